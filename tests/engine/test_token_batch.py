"""Tokens on their way to slots, against lists of tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.engine.token_batch import (
    SlotData,
    TokenBatch,
    assign_first,
    assign_first_state,
    first_slots,
    slots_after,
    with_dictionary,
)
from tests.engine.parts import Worth, generator, shuffled

ROWS = 2
HEADS = 3
DIM = 4
NOTHING = (0, 0)
"""Keys and state of an empty slot."""


def batch(count: int, seed: int, share: float = 0.6) -> TokenBatch:
    """Tokens whose keys, values and state say which position they have."""
    positions = shuffled(count, rows=ROWS, heads=HEADS, most=50, seed=seed) + 1
    chosen = torch.rand(positions.shape, generator=generator(seed)) < share
    keys = positions[..., None].expand(*positions.shape, DIM).float()
    return TokenBatch(keys, -keys, positions, Worth(keys[..., 0] / 2, positions.long()), chosen)


def check(data: SlotData | TokenBatch, b: int, h: int, want: list[int]) -> None:
    """The slots of a head hold the tokens of these positions, -1 for none, in all their parts."""
    numbers = [max(position, 0) for position in want]
    count = len(want)
    assert data.positions[b, h, :count].tolist() == want
    assert data.keys[b, h, :count].tolist() == [[float(n)] * DIM for n in numbers]
    assert data.values[b, h, :count].tolist() == [[-float(n)] * DIM for n in numbers]
    assert data.state.worth[b, h, :count].tolist() == [n / 2 for n in numbers]
    assert data.state.number[b, h, :count].tolist() == numbers


def heads() -> list[tuple[int, int]]:
    return [(b, h) for b in range(ROWS) for h in range(HEADS)]


def chosen_positions(some: TokenBatch, b: int, h: int) -> list[int]:
    return some.positions[b, h][some.chosen[b, h]].tolist()


def test_tokens_are_taken_with_all_their_parts() -> None:
    some = batch(6, 0)
    index = torch.tensor([[[5, 0, 0, 2]] * HEADS, [[1, 1, 3, 4]] * HEADS])
    taken = some.take(index)
    for b, h in heads():
        check(taken, b, h, some.positions[b, h, index[b, h]].tolist())
        assert taken.chosen[b, h].tolist() == some.chosen[b, h, index[b, h]].tolist()


@pytest.mark.parametrize(("start", "size"), [(0, 6), (2, 3), (4, 5), (5, 1)])
def test_a_window_repeats_the_last_token(start: int, size: int) -> None:
    some = batch(6, 1)
    taken = some.window(start, size)
    for b, h in heads():
        check(taken, b, h, [int(some.positions[b, h, min(place, 5)]) for place in range(start, start + size)])


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_chosen_tokens_are_sorted_trimmed_and_brought_to_the_front(share: float) -> None:
    some = batch(7, 2, share)
    most = max(*(len(chosen_positions(some, b, h)) for b, h in heads()), 1)
    trimmed = some.trimmed()
    front = some.front(most)
    assert trimmed.positions.shape[-1] == most
    for b, h in heads():
        want = chosen_positions(some, b, h)
        assert some.positions[b, h, some.by_position()[b, h]][: len(want)].tolist() == sorted(want)
        check(trimmed, b, h, sorted(want))
        check(front, b, h, want)
        for got in (trimmed, front):
            assert got.chosen[b, h].tolist() == [True] * len(want) + [False] * (most - len(want))


@pytest.mark.parametrize("size", [3, 5])
def test_a_batch_fills_the_first_slots(size: int) -> None:
    some = batch(3, 3, share=1.0)
    empty = torch.tensor([False, True, False]).expand(ROWS, HEADS, 3)
    before = some.positions.clone()
    data = first_slots(some.take(torch.arange(3).expand(ROWS, HEADS, 3)), empty, size)
    assert data.keys.shape == data.values.shape == (ROWS, HEADS, size, DIM)
    for b, h in heads():
        check(data, b, h, [int(before[b, h, 0]), -1, int(before[b, h, 2])])
        assert not data.keys[b, h, 3:].any() and not data.values[b, h, 3:].any()


@pytest.mark.parametrize("seed", range(8))
def test_what_stays_comes_after_the_dictionary(seed: int) -> None:
    """By position, whatever the order of demotion was; slots of other rows' dictionaries are not skipped."""
    dice = generator(seed)
    count = 6
    size = 9
    some = batch(count, seed)
    shuffle = torch.rand(ROWS, HEADS, count, generator=dice) + (~some.chosen) * 2
    order = shuffle.argsort(-1)  # what is not chosen comes last
    counts = some.chosen.sum(-1)
    moved = (torch.rand(ROWS, HEADS, generator=dice) * (counts + 1)).long()
    start = torch.tensor([2, 0])[:, None, None]
    data = slots_after(some, order, moved, start, size)
    assert data.positions.shape == (ROWS, HEADS, size) and data.keys.shape[2] == size
    for b, h in heads():
        leaving = order[b, h, : int(moved[b, h])].tolist()
        stays = sorted(
            int(some.positions[b, h, j]) for j in range(count) if bool(some.chosen[b, h, j]) and j not in leaving
        )
        first = int(start[b])
        check(data, b, h, [-1] * first + stays + [-1] * (size - first - len(stays)))


def test_a_dictionary_keeps_what_it_holds() -> None:
    new = batch(5, 4).data
    held = batch(5, 5).data
    open_slots = torch.tensor([[False, False, True, True, True], [True] * 5])[:, None]
    new, held = (each._replace(counts=each.positions.float().log()) for each in (new, held))
    data = with_dictionary(new, held, 2, open_slots)
    assert isinstance(data.counts, Tensor)
    assert torch.equal(data.counts, data.positions.float().log())
    for b, h in heads():
        want = new.positions[b, h].tolist()
        check(data, b, h, held.positions[b, h, :2].tolist() + want[2:] if b == 0 else want)


@pytest.mark.parametrize("rows", [None, [True, False]])
def test_the_first_slots_are_assigned_in_place(rows: list[bool] | None) -> None:
    target = torch.zeros(ROWS, HEADS, 5)
    state = Worth(torch.zeros(ROWS, HEADS, 5), torch.zeros(ROWS, HEADS, 5, dtype=torch.int64))
    data = torch.arange(ROWS * HEADS * 2).view(ROWS, HEADS, 2) + 1
    mask: Tensor | None = None if rows is None else torch.tensor(rows)[:, None, None]
    assign_first(target, data.float(), mask)
    assign_first_state(state, Worth(data.float(), data), mask)
    for b, h in heads():
        want = data[b, h].tolist() if rows is None or rows[b] else [*NOTHING]
        for got in (target, state.worth, state.number):
            assert got[b, h].tolist() == [*want, 0, 0, 0]
