"""The parts of KVCrush, each against its definition."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from kvpolicy import H2O, KeyDiff, KVCrush
from kvpolicy.protocols import View
from kvpolicy.selectors.crush import anchor_bits, distances, representatives, signatures, top_mask
from kvpolicy.selectors.kvcrush import Pages, best_pages, min_page_tokens
from kvpolicy.statistics import AttentionSum, Results
from tests.conformance.bench import Bench, draw


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


@pytest.mark.parametrize(("quantile", "ones"), [(0.9, 1), (0.7, 3), (0.75, 2), (0.0, 10), (1.0, 0)])
def test_a_fraction_of_a_head_is_counted_as_it_is_written(quantile: float, ones: int) -> None:
    bits = signatures(torch.rand(1, 1, 12), torch.arange(12).expand(1, 1, -1) >= 2, quantile)
    assert int(bits.sum()) == ones and not bits[..., :2].any()


def test_half_of_the_tokens_are_no_majority() -> None:
    bits = torch.tensor([[[1, 1, 0, 0, 1], [1, 1, 0, 1, 0], [0, 1, 0, 0, 1]]]).bool()
    valid = torch.tensor([1, 1, 1, 1, 0]).bool().expand_as(bits)
    assert anchor_bits("mean", bits, valid, 0).tolist() == [[False, True, False]]


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


def test_layers_have_anchors_of_their_own() -> None:
    for layer in (0, 5):
        bench = Bench("kvcrush:split=0.5/h2o@8", [8], layer_idx=layer)
        bench.forward(*draw(40, 2))
        bench.check()


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
