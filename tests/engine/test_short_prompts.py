"""A prompt of which the budget's fraction is less than the smallest budget keeps all its tokens."""

from __future__ import annotations

import pytest
import torch

import kvpolicy
from kvpolicy import KVPolicyError, Policy, PolicyCache
from kvpolicy.planning.tokens import SHORT_PROMPT
from tests.conformance.access import kept_positions
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch

NEW = 3
HEADS = ["uniform/adakv+snapkv@{}", "squeeze/adakv+h2o@{}", "uniform/adakv+h2o+tokenwise:residual_length=4@{}"]
POLICIES = [*HEADS, "streaming:sinks=4@{}", "squeeze+streaming:sinks=4@{}", "streaming:sinks=4:decode=grow@{}"]


def prefilled(policy: str | Policy, rows: list[int], steps: int = 0) -> PolicyCache:
    model = build("llama", layers=3)
    ids, mask = make_batch(rows, [max(rows)] + [1] * steps)
    with kvpolicy.attach(model, policy), torch.no_grad():
        cache = PolicyCache(model, new=NEW)
        forward(model, ids, mask, 0, max(rows), cache)
        for column in range(max(rows), max(rows) + steps):
            forward(model, ids, mask, column, column + 1, cache)
    return cache


def lengths_held(cache: PolicyCache) -> list[list[int]]:
    """Tokens of each head of each row, in the layer that holds the fewest."""
    counts = torch.stack([(layer.head_positions >= 0).sum(-1) for layer in cache.policy_layers])
    return counts.amin(0).tolist()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [5, 6, 10, 13, 33])
def test_all_tokens_are_kept_as_planned(policy: str, length: int) -> None:
    """Also where pages of heads would be rounded down."""
    spec = policy.format(0.1)
    cache = prefilled(spec, [length])
    assert lengths_held(cache) == [[length] * 2]
    assert cache.plan is not None and cache.nbytes == cache.plan.nbytes
    model = build("llama", layers=3)
    planned = kvpolicy.plan(model.config, spec, prompt=length, new=NEW, dtype=torch.float32)
    assert planned.nbytes == cache.nbytes
    assert (length <= Policy.parse(spec).min_tokens) or "kept whole, since 0.1 of the prompt is less" in planned.note
    assert cache.report().nbytes == cache.nbytes


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_evict_from_no_more_than_the_prompt(policy: str) -> None:
    """A long answer to a short prompt does not grow the cache: it is the prompt that is kept whole."""
    cache = prefilled(policy.format(0.1), [10], steps=NEW)
    held = lengths_held(cache)[0]
    assert all(10 <= count <= 13 for count in held)
    budgets = [int(layer.budget) for layer in cache.policy_layers]
    assert budgets == [10 + NEW * (cache.policy.decode == "grow") + 2 * ("adakv" in policy)] * 3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_short_row_is_kept_whole_beside_a_long_one(policy: str) -> None:
    spec = policy.format(0.1)
    together = prefilled(spec, [100, 10])
    alone = prefilled(spec, [10])
    assert lengths_held(together)[1] == [10, 10] and max(lengths_held(together)[0]) < 30
    for layer, own in zip(together.policy_layers, alone.policy_layers, strict=True):
        assert kept_positions(layer)[1] == kept_positions(own)[0]


@pytest.mark.parametrize("spec", ["uniform/adakv+snapkv@0.005", "streaming:sinks=4@0.005"])
def test_of_a_longer_prompt_the_fraction_is_too_small(spec: str) -> None:
    config = build("llama", layers=2).config
    kept = kvpolicy.plan(config, spec, prompt=SHORT_PROMPT)
    assert all(layer.tokens >= SHORT_PROMPT for layer in kept.layers)
    with pytest.raises(KVPolicyError, match=rf"budget must be at least \d tokens .* of {SHORT_PROMPT + 1} prompt"):
        kvpolicy.plan(config, spec, prompt=SHORT_PROMPT + 1)


def test_policies_by_layer_keep_a_short_prompt_whole() -> None:
    specs = ["streaming:sinks=4@0.1", "uniform/adakv+h2o@0.2", "h2o@0.1"]
    cache = prefilled(Policy.by_layer(specs, budget=0.1), [10])
    assert lengths_held(cache) == [[10, 10]]
    assert cache.plan is not None and cache.nbytes == cache.plan.nbytes
