"""The laws of mergers, by hand: what a kept token and the evicted ones become; and what every merger refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import D2O, Blend, CountedMerge, Elastic, KeepKV, KVMerger, Policy
from kvpolicy.mergers.d2o import D2OState
from kvpolicy.registry import lookup, names
from tests.conformance.models import build
from tests.conformance.play import play
from tests.mergers.cases import KEYS, VALUES, candidates, held, merged

ACTIVE = [name for name in names("merger") if lookup(name)[1]().traits.when != "never"]
ROWS = torch.tensor([[[0.1, 0.3, 0.6, 0.0], [0.1, 0.3, 0.2, 0.4]]])
"""Attention to token 1 is three times that to 0, to which it goes."""
E1 = math.exp(-1)


@pytest.mark.parametrize(
    ("merger", "weight", "total"),
    [
        (CountedMerge(), 1, 2),
        (Blend(), 0.385056, 1.385056),
        (D2O(), 0.993884, 2),  # the cosine, which is its own threshold
        (Elastic(), 1, 2),
        (KeepKV(window=2), 3, 4),
        (KVMerger(), E1, 1 + E1),  # token 1 is its own mean distance away from 0
    ],
    ids=["merge", "blend", "d2o", "elastic", "keepkv", "kvmerger"],
)
def test_vector(merger: Any, weight: float, total: float) -> None:
    """Tokens 0, 2 and 3 stay, and 1 goes to 0 with a weight; keys move too, unless values alone are merged."""
    result = merged(merger, candidates(KEYS, VALUES, [0, 2, 3], rows=ROWS))
    for found, before in ((result.keys, KEYS), (result.values, VALUES)):
        if found is not None:
            torch.testing.assert_close(found[0, 0, 0], (before[0] + weight * before[1]) / total, atol=1e-6, rtol=1e-6)
            assert torch.equal(found[0, 0, 1:], before[2:])
    assert (result.keys is None) is isinstance(merger, Blend | CountedMerge)
    assert (result.counts is not None) is isinstance(merger, CountedMerge | KeepKV)
    if result.counts is not None:
        torch.testing.assert_close(result.counts[0, 0], torch.tensor([math.log(2), 0.0, 0.0]))


@pytest.mark.parametrize("merger", [Blend(), D2O(decay=1.0), Elastic()], ids=lambda merger: type(merger).__name__)
def test_two_sources_of_one_target(merger: Any) -> None:
    """Both weights are from the token before; D2O divides by the number of tokens, and the others by all weights."""
    keys = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.8, 0.2]])
    values = torch.tensor([[3.0, 4.0], [5.0, 0.0], [0.0, 15.0]])
    state: Any = D2OState(torch.full((1, 1), -9.0), torch.ones(1, 1)) if isinstance(merger, D2O) else ()
    result = merger.merge_prompt(state, candidates(keys, values, [0]))
    cosines = torch.cosine_similarity(keys[1:], keys[:1])
    weights = {Blend: cosines * torch.tensor([5 / 10, 15 / 20]), D2O: cosines, Elastic: torch.ones(2)}[type(merger)]
    total = 3 if isinstance(merger, D2O) else 1 + weights.sum()
    torch.testing.assert_close(result.values[0, 0, 0], (values[0] + (weights[:, None] * values[1:]).sum(0)) / total)


@pytest.mark.parametrize(("least", "merges"), [(0.9938, True), (0.9939, False)])
@pytest.mark.parametrize("kind", [Blend, CountedMerge, KeepKV])
def test_the_gate(kind: Any, least: float, merges: bool) -> None:
    given = candidates(KEYS, VALUES, [0, 2, 3])
    result = merged(kind(least=least), given)
    assert torch.equal(result.values, given.at_targets(given.values)) is not merges
    assert result.counts is None or bool(result.counts.any()) is merges
    if kind is not Blend:
        merge = kind(least=least).merge_token((), held(KEYS[1:2], [1]), held(KEYS[[0, 2, 3]], [0, 2, 3]))
        assert merge.slot.item() == 0 and merge.write_mask.item() is merges


def test_the_nearest_position_and_ties() -> None:
    """Position 1 lies between 0 and 2, and 3 is nearest to 2: the earlier of two is taken."""
    result = merged(CountedMerge(by="position", least=-1), candidates(KEYS, VALUES, [0, 2]))
    assert result.counts is not None
    torch.testing.assert_close(result.counts[0, 0].exp(), torch.tensor([2.0, 2.0]))
    result = merged(CountedMerge(), candidates(torch.ones(4, 2), VALUES, [1, 3]))
    assert result.counts is not None
    torch.testing.assert_close(result.counts[0, 0].exp(), torch.tensor([3.0, 1.0]))


def test_one_by_one_is_all_at_once() -> None:
    """A prompt that is merged in steps of decoding gives the same slots."""
    keys, values = (torch.randn(20, 4, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    merger = CountedMerge(least=-1)
    kept = [1, 4, 7]
    want = merged(merger, candidates(keys, values, kept))
    slots = held(keys[kept], kept, values[kept].clone())
    for victim in sorted({*range(20)} - {*kept}, reverse=True):
        merge = merger.merge_token((), held(keys[[victim]], [victim], values[[victim]]), slots)
        assert merge.counts is not None and slots.counts is not None
        slots.values[0, 0, merge.slot.flatten()] = merge.values[0, 0]
        slots.counts[0, 0, merge.slot.flatten()] = merge.counts[0, 0]
    torch.testing.assert_close(slots.values, want.values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(slots.counts, want.counts, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ACTIVE)
def test_no_victim_is_the_base_bit_for_bit(name: str) -> None:
    base, merging = (play(build("llama"), policy, [26])[2] for policy in ("h2o@64", f"h2o+{name}@64"))
    assert torch.equal(base, merging)


def test_nothing_similar_is_the_base() -> None:
    base, merging = (play(build("llama"), policy, [26, 15])[2] for policy in ("snapkv@9", "snapkv+merge:least=1@9"))
    torch.testing.assert_close(base, merging, atol=1e-5, rtol=1e-5)


# ---- Blend


def test_opposite_keys_are_dropped() -> None:
    keys = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    result = merged(Blend(), candidates(keys, VALUES[:3], [0]))
    assert torch.equal(result.values[0, 0], VALUES[:1])


def test_values_without_a_length() -> None:
    """Two of them have no share; one evicted into a value of zeros has all of it."""
    for values, want in (([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0]), ([[0.0, 0.0], [4.0, 2.0]], [2.0, 1.0])):
        result = merged(Blend(), candidates(torch.ones(2, 2), torch.tensor(values), [0]))
        assert result.values[0, 0, 0].tolist() == pytest.approx(want)


# ---- D2O


@pytest.mark.parametrize("count", [2, 3, 5, 7, 40])
def test_equal_cosines_are_at_their_mean(count: int) -> None:
    """However their mean is rounded: all of them are merged."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        kept, evicted = torch.randn(2, 4, generator=generator)
        evicted = evicted + 2 * kept
        keys = torch.stack([kept, *[evicted] * count])
        cosine = torch.cosine_similarity(kept, evicted, dim=0)
        want = (kept + count * cosine * evicted) / (1 + count)
        torch.testing.assert_close(merged(D2O(), candidates(keys, keys, [0])).values[0, 0, 0], want)


def test_the_threshold_follows() -> None:
    state = D2O().alloc(1, 1, "cpu")
    slots = held(torch.eye(2), [0, 1])
    seen: list[tuple[float, bool]] = []
    for cosine, there in ((0.8, True), (0.9, True), (0.2, False), (0.75, True)):
        victim = held(torch.tensor([[cosine, -((1 - cosine**2) ** 0.5)]]), [5])
        merge = D2O().merge_token(state, victim._replace(there=torch.tensor([[[there]]])), slots)
        seen.append((round(float(state.threshold), 4), bool(merge.write_mask)))
        assert int(merge.slot) == 0
    assert seen == [(0.8, True), (0.85, True), (0.85, False), (0.8, False)]


# ---- Elastic


def test_a_victim_takes_half_of_the_nearest_slot() -> None:
    keys = torch.randn(4, 4)
    slots = held(keys[:3], [9, 2, 4])
    victim = held(keys[3:], [6])
    merge = Elastic().merge_token((), victim, slots)
    assert merge.slot.item() == 2 and merge.write_mask.item() and merge.keys is not None
    torch.testing.assert_close(merge.keys[0, 0, 0], keys[2:].mean(0))
    torch.testing.assert_close(merge.values[0, 0, 0], keys[2:].mean(0))
    assert not Elastic().merge_token((), victim, slots._replace(there=~slots.there)).write_mask.item()


# ---- KeepKV


def test_a_token_is_weighed_by_the_queries_that_see_it() -> None:
    """Two query heads of two queries each: token 3 is seen by the last one of both alone, and weighs 0.4, not 0.2."""
    rows = torch.tensor([[[0.2, 0.2, 0.6, 0.0], [0.2, 0.2, 0.2, 0.4]]])
    result = merged(KeepKV(window=2), candidates(KEYS, VALUES, [0, 1, 2], rows=rows.expand(2, -1, -1)))
    torch.testing.assert_close(result.values[0, 0, 2], (0.4 * VALUES[2] + 0.4 * VALUES[3]) / 0.8)


def test_queries_that_there_are_not_do_not_count() -> None:
    """Nor do those before the window, which a selector may ask for."""
    rows = torch.tensor([[[0.2, 0.2, 0.6, 0.0], [0.2, 0.2, 0.2, 0.4]]])
    weights = torch.tensor([[0.2], [0.2], [0.4], [0.4]])
    for window, before in ((5, torch.zeros(1, 3, 4)), (2, torch.rand(1, 3, 4))):
        given = candidates(torch.ones(4, 2), VALUES, [3], rows=torch.cat([before, rows], 1))
        result = merged(KeepKV(window=window), given)
        torch.testing.assert_close(result.values[0, 0, 0], (weights * VALUES).sum(0) / 1.2)


def test_tokens_without_attention_weigh_alike() -> None:
    rows = torch.tensor([[[0.0, 0.0, 0.5, 0.5]]])
    result = merged(KeepKV(window=1), candidates(KEYS, VALUES, [0, 2, 3], rows=rows))
    torch.testing.assert_close(result.values[0, 0, 0], (VALUES[0] + VALUES[1]) / 2)


def test_decoding_weighs_by_counts() -> None:
    slots = held(KEYS[[0, 2]], [0, 2], VALUES[[0, 2]], [3.0, 1.0])
    merge = KeepKV().merge_token((), held(KEYS[1:2], [1], VALUES[1:2]), slots)
    assert merge.keys is not None and merge.counts is not None
    torch.testing.assert_close(merge.keys[0, 0, 0], (3 * KEYS[0] + KEYS[1]) / 4)
    torch.testing.assert_close(merge.values[0, 0, 0], (3 * VALUES[0] + VALUES[1]) / 4)
    torch.testing.assert_close(merge.counts.exp().item(), 4.0)


# ---- KVMerger


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 2, 0, 4, 1, 3]])
def test_the_pivot_has_the_highest_priority_of_its_run(order: list[int]) -> None:
    """Of two runs of three: the first has two kept tokens, and the second none, so that its tokens are dropped."""
    keys = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.3], [0.0, 1.0], [0.1, 1.0], [0.0, 1.1]])
    values = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    priority = [1.0, 0.0, 2.0, 9.0, 9.0, 9.0]
    result = merged(KVMerger(), candidates(keys, values, [0, 2], order=order, priority=priority))
    assert torch.equal(result.values[0, 0, 0], values[0])
    torch.testing.assert_close(result.values[0, 0, 1], (values[2] + E1 * values[1]) / (1 + E1))
    tie = merged(KVMerger(), candidates(keys, values, [0, 2], order=order))
    assert torch.equal(tie.values[0, 0, 1], values[2]) and not torch.equal(tie.values[0, 0, 0], values[0])


def test_nearer_tokens_weigh_more() -> None:
    """And equal ones alike."""
    keys = torch.tensor([[1.0, 0.0], [1.0, 0.2], [1.0, 0.6]])
    weights = [math.exp(-((d / 0.4) ** 2)) for d in (0.2, 0.6)]  # twice the variance is the mean distance squared
    want = (keys[0] + weights[0] * keys[1] + weights[1] * keys[2]) / (1 + sum(weights))
    torch.testing.assert_close(merged(KVMerger(), candidates(keys, keys, [0])).values[0, 0, 0], want)
    equal = merged(KVMerger(), candidates(torch.ones(4, 2), VALUES, [1]))
    torch.testing.assert_close(equal.values[0, 0, 0], VALUES.mean(0))


def test_an_unlike_neighbor_ends_a_run() -> None:
    """Token 2 is as the pivot, but 1 stands between them."""
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    assert torch.equal(merged(KVMerger(), candidates(keys, VALUES[:3], [0])).values[0, 0], VALUES[:1])


# ---- Refusals


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("full+merge", r"must be combined with a selector that evicts tokens, got full, .*; try snapkv\."),
        ("full+regress", "a selector that evicts tokens, got full"),
        ("snapkv:decode=grow+merge@1.0", "must evict tokens, got the budget 1.0, which keeps them all; try 0.2"),
        ("h2o+regress@1.0", "must evict tokens"),
        ("h2o+merge:least=2", r"CountedMerge.least must be between -1 and 1, got 2.0; try 0.9"),
        ("h2o+merge:by=size", "by"),
        ("h2o+merge+merge", "at most one merger"),
        ("snapkv+blend:least=-0.5@0.2", r"Blend.least must be between 0 and 1, got -0.5"),
        ("snapkv+keepkv:window=0", "window must be at least 1"),
        ("snapkv+keepkv:least=2", r"KeepKV.least must be between -1 and 1"),
        ("h2o+kvmerger:least=2@0.2", r"KVMerger.least must be between -1 and 1"),
        ("snapkv+regress:queries=random@0.2", "queries"),
        ("snapkv+regress:window=0", "window must be at least 1"),
        ("snapkv+zsmerge:slots=0", "slots must be between 1 and 32767"),
        ("snapkv+zsmerge:alpha=0.0", "alpha must be between 0.01 and 1"),
    ],
)
def test_refusals(spec: str, message: str) -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match=message):
        Policy.parse(spec)


def test_a_budget_of_one_keeps_its_merger_where_tokens_are_evicted() -> None:
    assert Policy.parse("h2o+merge@1.0").merger == CountedMerge()
    assert Policy.parse("h2o+drop@0.2") == Policy.parse("h2o@0.2")
