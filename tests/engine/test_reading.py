"""Which entries are read: their slots, their ranking, and what a prompt says about channels."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import KIVI, DoubleSparsity, ExactTopK, Plain, Quest, ReadAll, TokenWise
from kvpolicy.engine.reading import (
    Choice,
    ReadShape,
    by_entry,
    channel_salience,
    choose,
    entries_of,
    entry_slots,
    follow,
    largest_counts,
    need_of,
    read_shape,
    row_entries,
)
from kvpolicy.protocols import SINGLE_RANK, Layout
from kvpolicy.statistics.channel_sums import absolute_sums
from tests.engine.parts import generator


def by_score(score: Tensor, ranks: Any = SINGLE_RANK) -> Any:
    """How much entries are needed by their scores."""
    return partial(need_of, score, ranks=ranks)


ONE = ReadShape(3, 2, ((0, 8),))
TWO = ReadShape(3, 2, ((5, 7), (12, 4)))


def test_entries_end_where_their_part_ends() -> None:
    slots, inside = entry_slots(TWO, torch.arange(TWO.entries)[None, None])
    found = [page[own].tolist() for page, own in zip(slots[0, 0], inside[0, 0], strict=True)]
    assert found == [[5, 6, 7], [8, 9, 10], [11], [12, 13, 14], [15]]
    assert int(slots.max()) == 15
    assert entries_of(TWO, 0, torch.tensor([0, 3, 6])).tolist() == [0, 1, 2]
    assert entries_of(TWO, 1, torch.tensor([0, 3])).tolist() == [3, 4]


def test_positions_by_entry_are_those_of_its_slots() -> None:
    positions = torch.arange(16, dtype=torch.int32)[None, None]
    held = by_entry(TWO, positions)[0, 0]
    assert held.tolist() == [[5, 6, 7], [8, 9, 10], [11, -1, -1], [12, 13, 14], [15, -1, -1]]


@pytest.mark.parametrize(
    ("reader", "codec", "layout", "want"),
    [
        (Quest(read=8, dense=0), Plain(), Layout(30), ReadShape(4, 2, ((0, 30),))),
        (Quest(read=8, dense=1), Plain(), Layout(30), None),
        (Quest(read=29, dense=0), Plain(), Layout(30), None),
        (Quest(read=8, dense=0), Plain(), Layout(5000), ReadShape(16, 1, ((0, 5000),))),
        (Quest(read=8, page=5, dense=0), KIVI(group_size=4), Layout(6, (12,)), ReadShape(8, 2, ((6, 12),))),
        (Quest(read=8, page=5, dense=0), KIVI(group_size=4), Layout(6, (24,)), ReadShape(8, 2, ((6, 24),))),
        (ExactTopK(read=0.25), TokenWise(), Layout(6, (8, 0, 12)), ReadShape(1, 5, ((6, 8), (14, 12)))),
        (DoubleSparsity(read=3, dense=0), Plain(), Layout(3), None),
        (ReadAll(), Plain(), Layout(30), None),
        (ExactTopK(), Plain(), Layout(0), None),
    ],
)
def test_what_is_read_follows_from_the_layout(reader: object, codec: object, layout: Layout, want: object) -> None:
    found = read_shape(reader, codec, layout, 0)  # pyright: ignore[reportArgumentType]
    if want is not None and isinstance(want, ReadShape) and want.chosen >= want.entries:
        want = None
    assert found == want


def test_a_short_row_reads_what_it_would_alone() -> None:
    reader = ExactTopK(read=0.25)
    shape = read_shape(reader, Plain(), Layout(40), 0)
    assert shape is not None and shape.chosen == 10
    assert row_entries(reader, Plain(), shape, [40, 12, 0]) == [10, 3, 1]
    pages = Quest(read=0.25, page=4, dense=0)
    shape = read_shape(pages, Plain(), Layout(40), 0)
    assert shape is not None and shape.chosen == 3
    # Tokens that are read, in whole pages.
    assert row_entries(pages, Plain(), shape, [40, 32, 20, 12]) == [3, 2, 2, 1]


def test_a_short_row_reads_all_entries_that_hold_what_it_reads_alone() -> None:
    """Alone, it would have pages of 4 slots: 20 slots are five of these, and two of 16."""
    reader = Quest(read=20)
    shape = ReadShape(16, 2, ((0, 5008),))
    assert row_entries(reader, Plain(), shape, [5000, 100]) == [2, 2]


def test_the_first_token_may_be_in_the_buffer() -> None:
    """It is read there, so that the first of the coded tokens is read only if it is needed."""
    positions = torch.tensor([[[0, 9, -1, 3, 4, 5, 6]]], dtype=torch.int32)
    shape = ReadShape(1, 2, ((3, 4),))
    score = torch.tensor([[[[-9.0, 0, 2, 1]]]])
    for held, want in ((positions, [5, 6]), (positions.masked_fill(positions == 0, -1), [3, 5])):
        found = choose(shape, torch.tensor([2]), by_score(score), held, torch.tensor([10]), 1)
        assert sorted(held[0, 0][found.slots[0, 0][found.chosen[0, 0]]].tolist()) == want


def test_the_query_head_that_needs_an_entry_most_decides() -> None:
    score = torch.tensor([[[[0.0, 1.0, 50.0], [5.0, 0.0, 0.0]]]])
    need = need_of(score, torch.tensor([[[False, False, True]]]), SINGLE_RANK)[0, 0]
    want = [math.log(math.exp(5) / (math.exp(5) + 1)), math.log(math.e / (1 + math.e))]
    assert need[:2].tolist() == pytest.approx(want, abs=1e-6)


def salience(q: Tensor, k: Tensor, valid: Tensor | None) -> Tensor:
    count = torch.full((len(q),), q.shape[2]) if valid is None else valid.sum(-1)
    return channel_salience(absolute_sums(q, k, valid), count, SINGLE_RANK)


def test_salience_is_a_mean_over_all_pairs_and_ignores_padding() -> None:
    q = torch.randn(2, 4, 5, 3, generator=generator(1))
    k = torch.randn(2, 2, 5, 3, generator=generator(2))
    valid = torch.tensor([[True] * 5, [False, False, True, True, True]])
    found = salience(q, k.masked_fill(~valid[:, None, :, None], torch.nan), valid)
    for row, start in ((0, 0), (1, 2)):
        for head in range(2):
            pairs = q[row, 2 * head : 2 * head + 2, start:, None] * k[row, None, head, None, start:]
            assert torch.allclose(found[row, head], pairs.abs().mean((0, 1, 2)), atol=1e-6)
    alone = salience(q[1:, :, 2:], k[1:, :, 2:], None)
    assert torch.equal(found[1:], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_salience_of_thousands_of_tokens_is_not_rounded(dtype: torch.dtype) -> None:
    q, k = (torch.ones(1, heads, 3001, 2, dtype=dtype) for heads in (2, 1))
    valid = torch.arange(3001)[None] > 0
    for given in (None, valid):
        assert salience(q, k, given).flatten().tolist() == pytest.approx([1.0, 1.0], abs=1e-6)


def test_the_count_of_an_empty_slot_does_not_matter() -> None:
    positions = torch.arange(16, dtype=torch.int32).masked_fill(torch.arange(16) % 3 == 0, -1)[None, None]
    counts = torch.arange(16.0)[None, None]
    assert largest_counts(TWO, counts, positions).tolist() == [[[7, 10, 11, 14, 0]]]


class Beside:
    """Another rank, whose query heads need the last entry most."""

    def largest(self, need: Tensor) -> Tensor:
        other = torch.full_like(need, -9.0)
        other[..., -1] = -0.01
        return torch.maximum(need, other)


def test_query_heads_of_other_ranks_decide_too() -> None:
    ranks: Any = Beside()
    positions = torch.arange(8, dtype=torch.int32)[None, None]
    score = torch.tensor([[[[0.0, 5, 0, 0, 0, 0, 0, 0]]]])
    shape = ReadShape(1, 2, ((0, 8),))
    # Position 8 is the newest, and in none of the slots.
    found = choose(shape, torch.tensor([2]), by_score(score, ranks), positions, torch.tensor([9]), 0)
    assert sorted(found.slots[0, 0].tolist()) == [0, 7], "the first token, and that of the other rank"
    alone = choose(shape, torch.tensor([2]), by_score(score), positions, torch.tensor([9]), 0)
    assert sorted(alone.slots[0, 0].tolist()) == [0, 1]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_layer_that_follows_reads_the_newest_token_besides_what_was_chosen(limit: int) -> None:
    """Even if the layer that chooses does not show it; and of the chosen tokens, those that it holds."""
    positions = torch.tensor([[[6, 2, -1, 9, 4, 0]]], dtype=torch.int32)
    choice = Choice(torch.tensor([[[4, 7, -1, 2]]], dtype=torch.int32), torch.zeros(1, 1, 4, dtype=torch.int32))
    found = follow(ReadShape(1, 3, ((0, 6),), 1), torch.tensor([limit]), choice, positions, torch.tensor([10]), False)
    assert positions[0, 0][found.slots[0, 0][found.chosen[0, 0]]].tolist() == [9, 4, 2][:limit]
