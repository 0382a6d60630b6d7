"""Selectors at their limits: windows, shares, tiles and parts that hold with equality, and states of their own."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any, ClassVar

import pytest
import torch

from kvpolicy import H2O, ExpectedAttention, KeyDiff, KVCrush, KVzip, ProbeSalience, Scissorhands, SnapKV
from kvpolicy.engine.selection import highest
from kvpolicy.kernels.rotary import KeyRotation
from kvpolicy.protocols import HeadShape, View
from kvpolicy.protocols.selector import Scores
from kvpolicy.selectors import expected
from kvpolicy.selectors.caote import CAOTE
from kvpolicy.selectors.common import head_sum, shares
from kvpolicy.selectors.crush import anchor_bits, distances, representatives, signatures, top_mask
from kvpolicy.selectors.dropkv import squared_losses
from kvpolicy.selectors.kvcrush import Pages, best_pages, min_page_tokens
from kvpolicy.selectors.scissorhands import BelowMean
from kvpolicy.statistics import AttentionSum, Candidates, Moments, ObservedMoments, Replay, Results, Vectors
from tests.conformance.bench import Bench, draw
from tests.selectors.test_unrotated import DIM, scores


def view(count: int, budget: int) -> View:
    """One row and head of `count` tokens."""
    return View(torch.arange(count, dtype=torch.int32)[None, None], torch.tensor([count]), torch.tensor([budget]), 0)


@pytest.mark.parametrize(("recent", "budget", "window"), [(0.07, 100, 7), (0.5, 9, 5), (0.0, 9, 1), (1.0, 9, 9)])
def test_the_window_of_h2o_is_rounded_up(recent: float, budget: int, window: int) -> None:
    priority = H2O(recent=recent).priority(Scores(torch.zeros(1, 1, 200)), view(200, budget))
    assert int((priority == torch.inf).sum()) == window


@pytest.mark.parametrize(("budget", "window"), [(1, 1), (2, 1), (3, 1), (7, 3), (8, 4), (99, 4)])
def test_the_window_of_snapkv_is_at_most_half_the_budget(budget: int, window: int) -> None:
    priority = SnapKV(window=4).priority(Scores(torch.zeros(1, 1, 200)), view(200, budget))
    assert (priority == torch.inf).nonzero()[:, -1].tolist() == [*range(200 - window, 200)]


def test_sinks_leave_room_for_the_newest_token_alone() -> None:
    given = view(9, 6)
    priority = Scissorhands(sinks=5, recent=3).priority(Scores(torch.zeros(1, 1, 9)), given)
    assert highest(priority, given, given.budget[:, None])[0, 0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4, 8]


@pytest.mark.parametrize(("added", "left"), [(0, 1.0), (6, 0.25), (8, 0.0), (20, 0.0)])
def test_counts_leave_the_window_and_no_more(added: int, left: float) -> None:
    given = view(4, 4)._replace(added=torch.tensor([added]))
    seen = Results({BelowMean: torch.zeros(1, 1, 4)})
    state: Any = Scissorhands(window=8).observe(Scores(torch.full((1, 1, 4), 2.0)), seen, given)
    assert state.score.tolist() == [[[2 * left] * 4]]


def test_a_replayed_token_without_attention_ranks_below_all_others() -> None:
    selector = KVzip(sinks=0)
    replay = torch.tensor([[[0.0, 0.5, -1.0, 1e-30]]])
    state: Any = selector.observe(selector.alloc(1, 1, 4, "cpu"), Results({Replay: replay}), view(4, 4))
    assert state.score.sign().tolist() == [[[-1, -1, 0, -1]]]
    assert selector.priority(state, view(5, 4)._replace(positions=view(4, 4).positions)).argsort().tolist() == [
        [[0, 3, 1, 2]]
    ]


@pytest.mark.parametrize(("budget", "sinks"), [(2, 1), (5, 2), (6, 3), (7, 3), (20, 3)])
def test_sinks_take_at_most_half_the_budget(budget: int, sinks: int) -> None:
    state: Any = KVzip(sinks=3).alloc(1, 1, 9, "cpu")
    priority = KVzip(sinks=3).priority(state, view(9, budget))
    assert (priority == torch.inf).nonzero()[:, -1].tolist() == [*range(sinks), 8]


def test_sums_and_numbers_of_probes_are_counted_apart() -> None:
    state: Any = ProbeSalience().alloc(1, 1, 3, "cpu")
    ProbeSalience().step(state, torch.full((1, 1, 1, 3), 0.25), view(3, 3))
    assert state.attn_sum.tolist() == [[[0.25] * 3]] and state.probes.tolist() == [[[1.0] * 3]]


@pytest.mark.parametrize("tile", [1, 4])
def test_keys_are_scored_in_tiles(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(1, heads, 9, DIM, generator=generator) for heads in (4, 2, 2))
    want = scores(queries, keys, values).score
    monkeypatch.setattr(expected, "_TILE", tile)
    torch.testing.assert_close(scores(queries, keys, values).score, want)


def test_the_length_that_was_scored_does_not_grow_with_the_row() -> None:
    """A store counts the tokens of its rows in place."""
    selector = ExpectedAttention(sinks=0)
    given = view(6, 4)
    state: Any = selector.alloc(1, 1, 6, "cpu")
    moments = expected.QueryMoments(torch.ones(1), torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4, 4))
    state = state._replace(total=moments.total, product=moments.product)
    keys = torch.randn(1, 1, 6, 4)
    observed = ObservedMoments(moments, KeyRotation(None))
    seen = Results({Vectors: Candidates(keys, keys, 0.5), Moments: observed})
    after: Any = selector.observe(state, seen, given)
    given.length.add_(3)
    assert after.ranked.tolist() == [6]


def test_the_only_token_that_is_attended_to_is_the_last_to_go() -> None:
    """In fp32 its weight is 1, and that of all others together 0."""
    weights = torch.tensor([[[[0.0, 1.0, 0.0]]]]).double()
    got = squared_losses(weights, torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(0)).double())
    assert int(got.argmax()) == 1


def test_nearly_all_attention_is_the_whole_output() -> None:
    """What is left without the token is too little to be told from rounding."""
    weights = torch.tensor([[[[1e-6, 1 - 2e-6, 1e-6]]]]).double()
    values = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    assert float(squared_losses(weights, values)[0, 0, 0, 1]) == float(values[0, 0, 1].square().sum())


def test_learned_sinks_keep_their_share() -> None:
    """They are in the softmax and have no value, so that nothing but the tokens is renormalized."""
    weights = torch.softmax(torch.randn(6, generator=torch.Generator().manual_seed(1)).double(), 0)
    values = torch.randn(6, 3, generator=torch.Generator().manual_seed(2)).double()
    values[0] = 0  # as a token of value 0 that is never dropped
    whole = squared_losses(weights[None, None, None], values[None, None])[0, 0, 0, 1:]
    sink = squared_losses(weights[None, None, None, 1:], values[None, None, 1:])[0, 0, 0]
    torch.testing.assert_close(whole, sink)


def test_shares_of_a_head_without_attention() -> None:
    attention = torch.tensor([[[0.0, 0.0], [1.0, 3.0]]])
    assert shares(attention, torch.ones_like(attention).bool()).tolist() == [[[0.0, 0.0], [0.25, 0.75]]]
    assert shares(attention, torch.tensor([[[True, True], [True, False]]])).tolist() == [[[0.0, 0.0], [1.0, 0.0]]]


def view_of(positions: list[list[int]], alike: bool) -> View:
    where = torch.tensor([positions], dtype=torch.int32)
    return View(where, torch.tensor([int(where.max()) + 1]), torch.tensor([2]), 0, alike=alike)


def test_sums_over_heads_are_by_position() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]])
    assert head_sum(x, view_of([[0, 1, 2], [0, 1, 2]], True)).tolist() == [[[11, 22, 33], [11, 22, 33]]]
    found = head_sum(x, view_of([[0, 1, 2], [-1, 0, 2]], False))
    assert found.tolist() == [[[21, 2, 33], [0, 21, 33]]]


def test_caote_needs_the_width_of_a_value() -> None:
    state: Any = CAOTE(base=H2O()).alloc(1, 2, 3, "cpu", HeadShape(2, 5))
    assert state.output.shape == (1, 2, 5)
    assert CAOTE(base=SnapKV(), every=9).rerank_every == 9
    assert CAOTE(base=CriticalLike(), every=9).rerank_every == 4


class CriticalLike(H2O):  # a base that ranks again more often
    """H2O that is ranked again."""

    rerank_every: ClassVar[int] = 4

    def rerank(self, state: Any, seen: Results, view: View) -> Any:
        return state


@pytest.mark.parametrize(("quantile", "ones"), [(0.9, 1), (0.7, 3), (0.75, 2), (0.0, 10), (1.0, 0)])
def test_a_fraction_of_a_head_is_counted_as_it_is_written(quantile: float, ones: int) -> None:
    bits = signatures(torch.rand(1, 1, 12), torch.arange(12).expand(1, 1, -1) >= 2, quantile)
    assert int(bits.sum()) == ones and not bits[..., :2].any()


def test_half_of_the_tokens_are_no_majority() -> None:
    bits = torch.tensor([[[1, 1, 0, 0, 1], [1, 1, 0, 1, 0], [0, 1, 0, 0, 1]]]).bool()
    valid = torch.tensor([1, 1, 1, 1, 0]).bool().expand_as(bits)
    assert anchor_bits("mean", bits, valid, 0).tolist() == [[False, True, False]]


def test_a_head_that_evicts_nothing_has_no_representatives() -> None:
    """Its row evicts, since another head holds more than the budget."""
    positions = torch.arange(9, dtype=torch.int32).repeat(1, 2, 1)
    positions[0, 1, :5] = -1
    view = View(positions, torch.tensor([9]), torch.tensor([4]), 0)
    crush = KVCrush(base=H2O(), split=0.5)
    state: Any = crush.alloc(1, 2, 9, "cpu")
    state = crush.observe(state, Results({AttentionSum: torch.rand(1, 2, 9)}), view)
    assert state.mark.sum(-1).tolist() == [[2, 0]]


def test_the_base_ranks_again_by_its_own_part_of_the_budget() -> None:
    class Told(KeyDiff):
        def rerank(self, state: Any, seen: Results, view: View) -> Any:
            told.append(view.budget.tolist())
            return state

    told: list[list[int]] = []
    view = View(torch.arange(9).expand(2, 1, -1), torch.tensor([9, 9]), torch.tensor([8, 5]), 0)
    crush = KVCrush(base=Told(), split=0.25)
    state: Any = crush.alloc(2, 1, 9, "cpu")
    crush.rerank(state, Results(), view)
    assert told == [[6, 4]]


@pytest.mark.parametrize("budget", [9, 20, 37])
@pytest.mark.parametrize(("at", "begins"), [("20_50", [0, 20, 50, 60]), ("auto:parts=4", [0, 15, 30, 45, 60])])
def test_parts_keep_the_same_share(at: str, begins: list[int], budget: int) -> None:
    """To the nearest token, whatever the base prefers: here long keys, which are all in the first part."""
    q, k, v = draw(60, 0)
    k[:, :, :15] *= 0.01  # the base keeps short ones
    bench = Bench(f"fair:at={at}/knorm", [budget])
    bench.forward(q, k, v)
    for kept in bench.turns[-1].kept[0]:
        for first, last in pairwise(begins):
            count = sum(first <= position < last for position in kept)
            assert abs(count - budget * (last - first) / 60) <= 1.5
    bench.check()
    alone = Bench("knorm", [budget])
    alone.forward(q, k, v)
    assert all(sum(position < 15 for position in kept) >= min(14, budget - 1) for kept in alone.turns[-1].kept[0])


def test_shares_of_equal_parts_are_exact() -> None:
    """Equal shares of two parts are equal numbers, of which the earlier token is kept."""
    q, k, v = draw(33, 3)
    bench = Bench("fair:at=11_22/h2o:recent=0.0", [10])
    bench.forward(torch.zeros_like(q), k, v)
    bench.check()


def test_distances_of_heads_that_hold_different_tokens() -> None:
    """A head that does not hold a token has a 0 for it; what stands at padding does not count."""
    dice = Random(1)
    places = [[[-1, -1, 0, 2, 5], [-1, 0, 2, 3, 5]], [[-1, 1, 2, 3, 4], [0, 1, 2, 3, 4]]]
    positions = torch.tensor(places, dtype=torch.int32)
    bits = torch.tensor([[[dice.random() < 0.7 for _ in range(5)] for _ in range(4)] for _ in range(2)])
    bits[..., 0] = True
    anchor = torch.tensor([[True, False, False, True], [False, True, False, False]])
    view = View(positions, torch.tensor([6, 5]), torch.tensor([3, 3]), 0)
    found = distances(bits, anchor, view)
    for row in range(2):
        held = [
            {place: int(bits[row, query, column]) for column, place in enumerate(places[row][query // 2]) if place >= 0}
            for query in range(4)
        ]
        for head in range(2):
            for column, place in enumerate(places[row][head]):
                want = sum(held[query].get(place, 0) != int(anchor[row, query]) for query in range(4))
                assert place < 0 or int(found[row, head, column]) == want


@pytest.mark.parametrize("seed", range(3))
def test_representatives_are_the_first_of_equal_ranges(seed: int) -> None:
    """Range i of n candidates in order of distance begins at rank i n / k, rounded down."""
    dice = Random(seed)
    distance = [dice.randrange(4) for _ in range(23)]
    candidates = [dice.random() < 0.8 for _ in range(23)]
    order = sorted((place for place in range(23) if candidates[place]), key=lambda place: (distance[place], place))
    for count in range(len(order) + 3):
        k = min(count, len(order))
        want = sorted(order[i * len(order) // k] for i in range(k))
        found = representatives(
            torch.tensor(candidates)[None, None],
            torch.tensor(distance)[None, None],
            None,
            torch.tensor([[count]]),
            "rank",
        )
        assert found[0, 0].nonzero()[:, 0].tolist() == want


@pytest.mark.parametrize("same", [True, False])
def test_the_highest_values_and_of_ties_the_first(same: bool) -> None:
    """For counts from none to all, which differ by row or not."""
    values = torch.randint(0, 4, (9, 8), generator=torch.Generator().manual_seed(0)).float()
    for shift in range(9):
        count = torch.full((9,), shift) if same else torch.arange(9).roll(shift)
        found = top_mask(values, count)
        for row, chosen, number in zip(values.tolist(), found, count.tolist(), strict=True):
            want = sorted(range(8), key=lambda place, row=row: (-row[place], place))[:number]
            assert chosen.nonzero()[:, 0].tolist() == sorted(want)


def test_pages_that_fit_exactly_are_kept() -> None:
    size = torch.tensor([[[4, 4, 4, 2, 0]]])
    value = torch.tensor([[[1.0, 5.0, 3.0, 0.0, 9.0]]])
    pages = Pages(torch.zeros(1, 1, 14, dtype=torch.int64), size, value, torch.zeros_like(size))
    kept = [best_pages(pages, torch.tensor([tokens]))[0, 0].nonzero()[:, 0].tolist() for tokens in (2, 5, 6, 9, 10, 14)]
    assert kept == [[3], [3], [1, 3], [1, 3], [1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize("page", [0, 1, 2, 5])
def test_room_for_tokens_that_follow_each_other_wherever_pages_end(page: int) -> None:
    for tokens in range(1, 13):
        size = page or 1
        pages = max(len({(newest - age) // size for age in range(tokens)}) for newest in range(20, 20 + size))
        assert min_page_tokens(tokens, page) == pages * size
