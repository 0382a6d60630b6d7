"""Budgets that are too small say which is the smallest that works, and that one works."""

from __future__ import annotations

import re

import pytest
import torch

import kvpolicy
from kvpolicy import Policy
from kvpolicy.testing import check_cache
from tests.conformance.access import kept_positions
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch, talk
from tests.conformance.policies import ALLOCATORS, SELECTORS, words
from tests.sampling import each_once, product

FLOORED = ["streaming:sinks=4", "streaming:sinks=9", "kvcrush:split=0.5/streaming:sinks=4"]


def fill(policy: Policy | str, lengths: list[int]) -> kvpolicy.PolicyCache:
    model = build("llama")
    with kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model)
        talk(model, *make_batch(lengths, [max(lengths)]), [max(lengths)], cache)
    return cache


def refused(policy: str, lengths: list[int]) -> str:
    """The one sentence that refuses a budget, the same from a plan and from the model."""
    with pytest.raises(ValueError) as planned:
        kvpolicy.plan(build("llama").config, policy, batch=len(lengths), prompt=lengths, dtype=torch.float32)
    with pytest.raises(ValueError) as met:
        fill(policy, lengths)
    assert str(planned.value) == str(met.value)
    assert str(met.value).count(". ") == 0 and str(met.value).endswith(".")
    return str(met.value)


@pytest.mark.filterwarnings("ignore:The text exceeds")
@pytest.mark.parametrize("selector", FLOORED)
def test_share(selector: str) -> None:
    said = refused(f"{selector}@0.005", [600, 527])  # shorter ones are kept whole
    fraction = re.search(r"; try [0-9]+ or ([0-9.]+)\.$", said)
    assert fraction, said
    works = fill(f"{selector}@{fraction[1]}", [600, 527])
    assert all(int(layer.budget.min()) >= works.policy.selector.min_tokens for layer in works.policy_layers)


@pytest.mark.parametrize("selector", FLOORED)
def test_tokens(selector: str) -> None:
    with pytest.raises(ValueError, match="must be at least") as error:
        Policy.parse(f"{selector}@3")
    smallest = re.search(r"at least ([0-9]+) tokens", str(error.value))
    assert smallest
    assert max(fill(f"{selector}@{smallest[1]}", [40]).policy_layers[0].budget.tolist()) == int(smallest[1])


PARTS = (ALLOCATORS, [*SELECTORS, "streaming:sinks=9"], ["plain", "kivi"])


@product("allocator,selector,codec", *PARTS, sample=each_once(*PARTS))
def test_bytes(allocator: str, selector: str, codec: str) -> None:
    policy = words(allocator, selector, codec, budget="64B")
    said = refused(policy, [40, 27])
    smallest = re.search(r"at least ([0-9]+)B", said)
    assert smallest, said
    cache = fill(words(allocator, selector, codec, budget=f"{smallest[1]}B"), [40, 27])
    assert cache.nbytes <= int(smallest[1])
    with pytest.raises(ValueError):
        fill(words(allocator, selector, codec, budget=f"{int(smallest[1]) - 1}B"), [40, 27])


def test_a_prompt_that_fits_below_the_floor() -> None:
    """So short that nothing is dropped: then a share that would be too small is no error."""
    cache = fill("streaming:sinks=9@0.1", [8])
    assert kept_positions(cache.policy_layers[0]) == [[list(range(8))] * 2]


@pytest.mark.parametrize("budget", [0.0, 1.5, -1, 0, "5 apples", "0B", True])
def test_what_is_no_budget(budget: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        kvpolicy.attach(build("llama"), "window", budget=budget)  # pyright: ignore[reportArgumentType]


def test_budget_of_attach_replaces_the_policys() -> None:
    with kvpolicy.attach(build("llama"), "window@0.5", budget=6) as handle:
        talk(build("llama"), *make_batch([20], [20]), [20], None)
        assert handle.policy == Policy.parse("window@6")
        assert handle.cache is not None and handle.cache.policy_layers[0].budget.tolist() == [6]


@pytest.mark.parametrize("policy", ["full", "kivi"])
def test_less_than_everything_needs_a_selector(policy: str) -> None:
    with pytest.raises(ValueError, match="must have a selector"):
        kvpolicy.attach(build("llama"), policy, budget=0.5)


@pytest.mark.parametrize("share", [0.1, 0.29, 0.5, 0.7, 1.0])
def test_a_share_is_of_each_rows_own_length(share: float) -> None:
    lengths = [100, 70, 31, 10]
    cache = fill(f"window@{share}", lengths)
    want = [max(1, round(share * 100) * n // 100) for n in lengths]
    assert cache.policy_layers[0].budget.tolist() == want
    assert (cache.policy_layers[0].positions >= 0).sum(-1)[:, 0].tolist() == want


def test_a_budget_that_shrinks_leaves_codes_where_they_are() -> None:
    """A later prompt, with fewer new tokens behind it, gives a layer of a pyramid less than the first one did."""
    model = build("llama")
    ids, mask = make_batch([12], [12])
    policy = "pyramid:beta=4+tova+tokenwise:group_size=4:residual_length=4:block_size=4@20"
    with kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model, prompt=5, new=20)
        forward(model, ids, mask, 0, 5, cache)
        before = int(cache.policy_layers[-1].budget)
        cache.expect(11, 20)
        forward(model, ids, mask, 5, 11, cache)
        last = cache.policy_layers[-1]
        assert int(last.budget) < before and bool((last.positions[..., last.layout.exact :] >= 0).any())
        check_cache(cache)
        forward(model, ids, mask, 11, 12, cache)
        check_cache(cache)
