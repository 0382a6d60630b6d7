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
from tests.engine.filled import attached, prompted
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
HEADS = ["uniform/adakv+snapkv@{}", "squeeze/adakv+h2o@{}", "uniform/adakv+h2o+tokenwise:residual_length=4@{}"]
POLICIES = [*HEADS, "streaming:sinks=4@{}", "squeeze+streaming:sinks=4@{}", "streaming:sinks=4:decode=grow@{}"]


def prefilled(policy: str | Policy, rows: list[int], steps: int = 0) -> PolicyCache:
    model = build("llama", layers=3)
    ids, mask = make_batch(rows, [max(rows)] + [1] * steps)
    with kvpolicy.attach(model, policy), torch.no_grad():
        cache = prompted(model, ids, mask, max(rows), new=NEW)
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


LONG = 60
SHORT = 31
FRACTION = 0.4
LEAST = 20  # more than the fraction of the short prompt, 12, and less than that of the long one, 24
STEPS = 4
BUDGETS = {LONG: FRACTION, SHORT: LEAST}
"""The plain budget that each prompt has."""

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


def positions(cache: PolicyCache, row: int) -> list[list[list[int]]]:
    """The positions of each layer and head of a row, sorted."""
    heads = [layer.head_positions[row].sort(-1).values.tolist() for layer in cache.policy_layers]
    return [[[place for place in head if place >= 0] for head in layer] for layer in heads]


def kept(policy: Policy, lengths: list[int], told: str = "", row: int | None = None) -> list[Any]:
    """What each row keeps after a prompt and after steps; or one `row`, which runs alone."""
    ids, mask = make_batch(lengths, [max(lengths), *[1] * STEPS], seed=5)
    if row is not None:
        columns = slice(max(lengths) - lengths[row], None)
        ids = ids[row : row + 1, columns]
        mask = mask[row : row + 1, columns]
        lengths = [lengths[row]]
    model = build("llama")
    found: list[Any] = []
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model, new=STEPS if told == "new" else None)
        start = 0
        for size in [max(lengths), *[1] * STEPS]:
            forward(model, ids, mask, start, start + size, cache)
            check_cache(cache)
            start += size
            found.append([positions(cache, each) for each in range(len(lengths))])
    return found


@product("spec,told", [*WITH_LEAST, "layers"], ["", "new"], sample=each_once([*WITH_LEAST, "layers"], ["", "new"]))
def test_a_row_has_the_larger_of_both(spec: str, told: str) -> None:
    """In a padded batch with prompts on both sides of the boundary, and alone."""
    budget = Share(FRACTION, least=LEAST)
    together = kept(of(spec, budget), [LONG, SHORT], told=told)
    for row, length in enumerate([LONG, SHORT]):
        own = [[turn[row]] for turn in together]
        assert kept(of(spec, budget), [LONG, SHORT], told=told, row=row) == own
        assert kept(of(spec, BUDGETS[length]), [LONG, SHORT], told=told, row=row) == own


def test_a_short_prompt_keeps_more_than_its_fraction_and_not_more_than_it_has() -> None:
    first, *_, last = kept(of("h2o", Share(FRACTION, least=LEAST)), [LONG, SHORT])
    assert [len(row[0][0]) for row in first] == [24, 20] == [len(row[0][0]) for row in last]
    (first, *_, last) = kept(of("h2o", Share(FRACTION, least=1024)), [SHORT])
    assert [len(row[0][0]) for row in (first[0], last[0])] == [SHORT, SHORT + STEPS]
    (first, *_, last) = kept(of(f"uniform/adakv+{SNAPKV}", Share(FRACTION, least=1024)), [SHORT], told="new")
    assert [len(row[0][0]) for row in (first[0], last[0])] == [SHORT, SHORT + STEPS]


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize(
    "spec", ["h2o", "pyramid+h2o", f"uniform/adakv+{SNAPKV}", f"{SNAPKV}:decode=grow+{CODES}", "layers"]
)
def test_what_is_planned_is_held(spec: str, length: int) -> None:
    policy = of(spec, Share(FRACTION, least=LEAST))
    model = build("llama")
    sizes: dict[str, Any] = {"prompt": length, "new": STEPS, "dtype": torch.float32}
    planned = kvpolicy.plan(model.config, policy, **sizes)
    with kvpolicy.attach(model, policy), torch.no_grad():
        cache = PolicyCache(model, new=STEPS)
        model(torch.arange(length)[None] % 40 + 3, cache=cache)
    assert planned.nbytes == cache.nbytes == kvpolicy.plan(model.config, of(spec, BUDGETS[length]), **sizes).nbytes
    assert cache.plan is not None
    assert [layer.tokens for layer in planned.layers] == [layer.tokens for layer in cache.plan.layers]


def test_layers_share_the_least_number() -> None:
    """As a mean over layers, and `plan` of a batch of different lengths has the slots of the fullest row."""
    plan = kvpolicy.plan(build("llama").config, f"pyramid+h2o@{FRACTION}:least={LEAST}", prompt=SHORT)
    assert sum(layer.tokens for layer in plan.layers) == 3 * LEAST and len({layer.tokens for layer in plan.layers}) > 1


def run(policy: str, length: int, **how: Any) -> None:
    with attached(policy, [length], [length], layers=2) as (model, ids, mask):
        forward(model, ids, mask, 0, length, PolicyCache(model, **how))
        forward(model, ids, mask, 0, length, PolicyCache(model, **how))


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
