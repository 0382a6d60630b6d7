"""Budgets that are too small say which is the smallest that works, and that one works."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import KVPolicyError, KVPolicyWarning, Policy, PolicyCache, Share
from kvpolicy.planning.tokens import SHORT_PROMPT
from kvpolicy.reporting.logging import without_warning_of_few_tokens
from kvpolicy.testing import check_cache
from tests.conformance.access import kept_positions
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch, talk
from tests.conformance.policies import ALLOCATORS, SELECTORS, words
from tests.engine.filled import attached, prompted, row_of
from tests.sampling import each_once, product

FLOORED = ["streaming:sinks=4", "streaming:sinks=9", "kvcrush:split=0.5/streaming:sinks=4"]


def fill(policy: Policy | str, lengths: list[int]) -> kvpolicy.PolicyCache:
    with attached(policy, lengths, [max(lengths)]) as (model, ids, mask):
        return prompted(model, ids, mask, max(lengths))


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


def test_budget_of_attach_replaces_the_policys() -> None:
    with kvpolicy.attach(build("llama"), "window@0.5", budget=6) as handle:
        talk(build("llama"), *make_batch([20], [20]), [20], None)
        assert handle.policy == Policy.parse("window@6")
        assert handle.cache is not None and handle.cache.policy_layers[0].budget.tolist() == [6]


def test_a_budget_that_shrinks_leaves_codes_where_they_are() -> None:
    """A later prompt, with fewer new tokens behind it, gives a layer of a pyramid less than the first one did."""
    policy = "pyramid:beta=4+tova+tokenwise:group_size=4:residual_length=4:block_size=4@20"
    with attached(policy, [12], [12]) as (model, ids, mask):
        cache = prompted(model, ids, mask, 5, prompt=5, new=20)
        before = int(cache.policy_layers[-1].budget)
        cache.expect(11, 20)
        forward(model, ids, mask, 5, 11, cache)
        last = cache.policy_layers[-1]
        assert int(last.budget) < before and bool((last.positions[..., last.layout.exact :] >= 0).any())
        check_cache(cache)
        forward(model, ids, mask, 11, 12, cache)
        check_cache(cache)


NEW = 3
HEADS = ["uniform/adakv+snapkv@0.1", "squeeze/adakv+h2o@0.1", "uniform/adakv+h2o+tokenwise:residual_length=4@0.1"]
POLICIES = [*HEADS, "streaming:sinks=4@0.1", "squeeze+streaming:sinks=4@0.1", "streaming:sinks=4:decode=grow@0.1"]


def prefilled(policy: str | Policy, rows: list[int], steps: int = 0) -> PolicyCache:
    with attached(policy, rows, [max(rows)] + [1] * steps) as (model, ids, mask):
        cache = PolicyCache(model, new=NEW)
        talk(model, ids, mask, [max(rows)] + [1] * steps, cache)
    return cache


def lengths_held(cache: PolicyCache) -> list[list[int]]:
    """Tokens of each head of each row, in the layer that holds the fewest."""
    counts = torch.stack([(layer.head_positions >= 0).sum(-1) for layer in cache.policy_layers])
    return counts.amin(0).tolist()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [5, 6, 10, 13, 33])
def test_all_tokens_are_kept_as_planned(policy: str, length: int) -> None:
    """Also where pages of heads would be rounded down."""
    cache = prefilled(policy, [length])
    assert lengths_held(cache) == [[length] * 2]
    assert cache.plan is not None and cache.nbytes == cache.plan.nbytes
    planned = kvpolicy.plan(build("llama").config, policy, prompt=length, new=NEW, dtype=torch.float32)
    assert planned.nbytes == cache.nbytes == cache.report().nbytes
    assert (length <= cache.policy.min_tokens) or "kept whole, since 0.1 of the prompt is less" in planned.note


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_evict_from_no_more_than_the_prompt(policy: str) -> None:
    """A long answer to a short prompt does not grow the cache: it is the prompt that is kept whole."""
    cache = prefilled(policy, [10], steps=NEW)
    assert all(10 <= count <= 13 for count in lengths_held(cache)[0])
    budgets = [int(layer.budget) for layer in cache.policy_layers]
    assert budgets == [10 + NEW * (cache.policy.decode == "grow") + 2 * ("adakv" in policy)] * 3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_short_row_is_kept_whole_beside_a_long_one(policy: str) -> None:
    together, alone = (prefilled(policy, rows) for rows in ([100, 10], [10]))
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


LONG = 60
SHORT = 31
FRACTION = 0.4
LEAST = 20  # more than the fraction of the short prompt, 12, and less than that of the long one, 24
STEPS = 4
BUDGETS = {LEAST: {LONG: FRACTION, SHORT: LEAST}, 1024: {LONG: 1024, SHORT: 1024}}
"""The plain budget that each prompt has by the least number: 1024 is more than any prompt has."""

SNAPKV = "snapkv:window=4:kernel=3"
CODES = "tokenwise:group_size=4:residual_length=4:block_size=4"
WITH_LEAST = [
    "window",
    "h2o",
    f"{SNAPKV}:decode=grow",
    f"kvcrush/{SNAPKV}",
    f"h2o+{CODES}",
    "h2o+merge",
    "h2o+mikv:group_size=4",
    "h2o+labels:read=8:channels=2:dense=0",
    "pyramid+h2o",
    "squeeze+h2o",
    f"cake+{SNAPKV}",
    f"uniform/adakv+{SNAPKV}",
    f"squeeze/adakv+{SNAPKV}+{CODES}",
    "kvzip",
]


def of(spec: str, budget: Any) -> Policy:
    """A policy with a budget; `layers` is one of three layers."""
    if spec != "layers":
        return Policy.parse(spec).with_budget(budget)
    return Policy.by_layer([f"{SNAPKV}@0.5", f"h2o+{CODES}@0.25", "h2o@0.4"], budget=budget)


def kept(policy: Policy, told: str, row: int | None = None) -> list[Any]:
    """What each row keeps after a prompt and after steps; or one `row`, which runs alone."""
    found: list[Any] = []
    with attached(policy, [LONG, SHORT], [LONG, *[1] * STEPS], seed=5) as (model, ids, mask):
        ids, mask = (ids, mask) if row is None else row_of(ids, mask, row)
        cache = PolicyCache(model, new=STEPS if told == "new" else None)
        start = 0
        for stop in range(ids.shape[1] - STEPS, ids.shape[1] + 1):
            forward(model, ids, mask, start, stop, cache)
            check_cache(cache)
            start = stop
            found.append([*zip(*map(kept_positions, cache.policy_layers), strict=True)])
    return found


LARGER = ([*WITH_LEAST, "layers"], ["", "new"], [*BUDGETS])


@product("spec,told,least", *LARGER, sample=[*each_once(*LARGER[:2], [LEAST, LEAST, 1024]), ("layers", "", LEAST)])
def test_a_row_has_the_larger_of_both(spec: str, told: str, least: int) -> None:
    """In a padded batch with prompts on both sides of the boundary, and alone."""
    budget = Share(FRACTION, least=least)
    together = kept(of(spec, budget), told)
    for row, length in enumerate([LONG, SHORT]):
        own = [[turn[row]] for turn in together]
        assert kept(of(spec, budget), told, row) == own
        assert kept(of(spec, BUDGETS[least][length]), told, row) == own


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize(
    "spec", ["h2o", "pyramid+h2o", f"uniform/adakv+{SNAPKV}", f"{SNAPKV}:decode=grow+{CODES}", "layers"]
)
def test_what_is_planned_is_held(spec: str, length: int) -> None:
    policy = of(spec, Share(FRACTION, least=LEAST))
    with attached(policy, [length], [length]) as (model, ids, mask):
        cache = prompted(model, ids, mask, length, new=STEPS)
    sizes: dict[str, Any] = {"prompt": length, "new": STEPS, "dtype": torch.float32}
    policies = (policy, of(spec, BUDGETS[LEAST][length]))
    planned, plain = (kvpolicy.plan(model.config, each, **sizes) for each in policies)
    assert planned.nbytes == cache.nbytes == plain.nbytes
    assert cache.plan is not None
    assert [layer.tokens for layer in planned.layers] == [layer.tokens for layer in cache.plan.layers]


def test_layers_share_the_least_number() -> None:
    """As a mean over layers, and `plan` of a batch of different lengths has the slots of the fullest row."""
    plan = kvpolicy.plan(build("llama").config, f"pyramid+h2o@{FRACTION}:least={LEAST}", prompt=SHORT)
    assert sum(layer.tokens for layer in plan.layers) == 3 * LEAST and len({layer.tokens for layer in plan.layers}) > 1


def run(policy: str, length: int) -> None:
    with attached(policy, [length], [length], layers=2) as (model, ids, mask):
        for _ in range(2):
            prompted(model, ids, mask, length)


@pytest.mark.filterwarnings("always")
def test_a_fraction_that_leaves_few_tokens_is_warned_of_once() -> None:
    with pytest.warns(KVPolicyWarning) as found:
        run("h2o@0.4", LONG)
    assert [str(warning.message) for warning in found] == [
        "The budget 0.4 leaves fewer than 64 tokens of a short prompt under h2o@0.4, too few for most answers; try "
        "0.4:least=1024, which keeps at least 1,024."
    ]


@pytest.mark.filterwarnings("error")
def test_other_budgets_are_not_warned_of() -> None:
    for policy in ("h2o@0.4:least=20", "h2o@24", "h2o@64KiB", "full", "h2o@1.0"):
        run(policy, LONG)
    run("h2o@0.4", 160)  # 64 tokens
    run("h2o@0.4", 1)  # all there are
    with without_warning_of_few_tokens():
        run("h2o@0.4", LONG)
    with pytest.raises(KVPolicyWarning, match="leaves fewer than 64"):
        run("h2o@0.4", 159)


def test_a_program_that_attaches_for_each_prompt_is_told_once() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for length in (LONG, SHORT):
            run("h2o@0.4", length)
    assert len(found) == 1
