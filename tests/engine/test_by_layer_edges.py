"""Policies that differ by layer where little is known or left: short prompts, tokens that nobody announced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import KVPolicyError, Policy, PolicyCache
from kvpolicy.hf.model_spec import describe
from tests.conformance.models import build
from tests.conformance.play import make_batch
from tests.conformance.policies import words


def steps(model: torch.nn.Module, cache: PolicyCache, prompt: int, count: int) -> None:
    """Run a prompt and some single tokens."""
    with torch.no_grad():
        model(torch.arange(prompt)[None] % 50, cache=cache)
        for token in range(count):
            model(torch.tensor([[token % 50]]), cache=cache)


@pytest.mark.parametrize("lengths", [[20], [26, 15]])
@pytest.mark.parametrize("budget", ["9000B", "40000B", "400000B"])
def test_bytes_beyond_a_prompt_are_for_what_follows(budget: str, lengths: list[int]) -> None:
    """Equal layers have the tokens of the ordinary policy, also where nobody announced how many will follow."""
    model = build("llama", layers=2)
    ids, mask = make_batch(lengths, [max(lengths), 40])
    kept: list[list[list[int]]] = []
    for policy in (Policy.by_layer(["h2o@0.5"] * 2, budget=budget), f"h2o@{budget}"):
        with kvpolicy.attach(model, policy), torch.no_grad():
            cache = PolicyCache(model)
            model(ids[:, : max(lengths)], attention_mask=mask[:, : max(lengths)], cache=cache)
            for column in range(max(lengths), ids.shape[1]):
                model(ids[:, column : column + 1], attention_mask=mask[:, : column + 1], cache=cache)
            kept.append([layer.budget.tolist() for layer in cache.policy_layers])
            assert cache.nbytes <= int(budget[:-1])
    assert kept[0] == kept[1]


def test_a_budget_in_tokens_beyond_a_prompt_is_for_what_follows() -> None:
    """A sliding window of 48 tokens' bytes does not slide after a prompt of 20."""
    model = build("llama", layers=2)
    with kvpolicy.attach(model, Policy.by_layer(["window@0.9", "h2o@0.3"], budget=48)):
        cache = PolicyCache(model)
        steps(model, cache, 20, 20)
        token = 2 * 2 * cache.policy_layers[0].store.shape.heads * cache.policy_layers[0].keys.shape[-1] * 4
        assert all(int((layer.positions >= 0).sum(-1).amin()) == 40 for layer in cache.policy_layers)
        assert 44 * token < cache.nbytes <= 48 * token


def test_a_growing_share_counts_what_was_announced() -> None:
    """Room for tokens that nobody announced is on top of the share of the prompt, as in other growing caches."""
    model = build("llama", layers=2)
    policy = Policy.by_layer(["h2o:decode=grow@0.5", "full"], budget=0.8)
    kept: list[list[int]] = []
    with kvpolicy.attach(model, policy):
        for new in (None, 0):
            cache = PolicyCache(model, new=new)
            steps(model, cache, 40, 0)
            kept.append([int((layer.positions >= 0).sum(-1).amin()) for layer in cache.policy_layers])
    assert kept[0] == kept[1] and kept[0][1] == 40


@pytest.mark.parametrize("prompt", [1, 2, 4, 5])
@pytest.mark.parametrize("new", [None, 6])
def test_a_layer_that_evicts_nothing_keeps_short_prompts(prompt: int, new: int | None) -> None:
    """Also where another layer's selector needs more tokens than the share, so that it is not met."""
    model = build("llama", layers=2)
    with kvpolicy.attach(model, Policy.by_layer(["streaming:decode=grow@0.5", "full"], budget=0.5)):
        cache = PolicyCache(model, new=new)
        steps(model, cache, prompt, 3)
        assert all(int((layer.positions >= 0).sum(-1).amin()) == prompt + 3 for layer in cache.policy_layers)


def test_the_smallest_share_that_is_named_works() -> None:
    """A share of more than 1 is never named, since it would be refused."""
    model = build("llama", layers=2)
    for specs, prompt in ((["full", "full"], 513), (["h2o@0.5", "h2o@0.1"], 600), (["snapkv@0.5", "h2o@0.1"], 700)):
        with pytest.raises(KVPolicyError, match="must be at least") as caught:
            kvpolicy.plan(model.config, Policy.by_layer(specs, budget=0.0005), prompt=prompt)
        share = float(str(caught.value).partition("at least ")[2].split()[0])
        kvpolicy.plan(model.config, Policy.by_layer(specs, budget=share), prompt=prompt)


def test_the_fewest_tokens_that_are_named_work() -> None:
    model = build("llama", layers=2)
    for specs, prompt in ((["snapkv@0.5", "streaming:sinks=5@0.1"], 31), (["streaming:sinks=8@0.5", "h2o@0.1"], 60)):
        with pytest.raises(KVPolicyError, match="must be at least") as caught:
            kvpolicy.plan(model.config, Policy.by_layer(specs, budget=1), prompt=prompt)
        tokens = int(str(caught.value).partition("at least ")[2].split()[0])
        kvpolicy.plan(model.config, Policy.by_layer(specs, budget=tokens), prompt=prompt)


def test_layers_that_no_policy_manages_have_no_part() -> None:
    """What is given for a sliding window is not used: no reader, no codec, and no calibration is looked for."""
    model = build("gemma2")
    managed = describe(model.config).evictable
    depth = model.config.num_hidden_layers
    for unused in (words("h2o", "kvquant"), words("h2o", "rotate"), "h2o+quest:read=6:page=2:dense=0@0.5"):
        specs = ["h2o@0.5" if index in managed else unused for index in range(depth)]
        with kvpolicy.attach(model, Policy.by_layer(specs, budget=0.8)) as handle, torch.no_grad():
            cache = PolicyCache(model, new=4)
            steps(model, cache, 20, 4)
            assert not handle.policy.reads_part and not handle.policy.undoes_rotation
            assert kvpolicy.plan(model, handle.policy, prompt=20, new=4).nbytes == cache.nbytes
    both = Policy.by_layer(["h2o@0.5", "window@0.5"] * (depth // 2), budget=0.8)
    with kvpolicy.attach(model, both) as handle:
        assert len(handle.policy.distinct) == 1
    with pytest.raises(KVPolicyError, match="one for each of the model's"):
        kvpolicy.attach(model, Policy.by_layer(["h2o@0.5"], budget=0.8))


@pytest.mark.parametrize(
    "content",
    [
        5,
        {"layers": 5},
        {"layers": [5], "budget": 0.1},
        {"layers": ["h2o"], "budget": 0.1},
        {"layers": [{}]},
        {"layers": [{}], "budget": 0.2, "codec": {}},
        {"layers": [], "budget": 0.2},
    ],
)
def test_data_that_describes_no_policy(content: Any) -> None:
    with pytest.raises(KVPolicyError):
        Policy.from_dict(content)
