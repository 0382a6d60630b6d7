"""Tokens on their way to slots, against lists of tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.engine.token_batch import SlotData, TokenBatch, slots_after, with_dictionary
from tests.engine.parts import Worth, generator, shuffled

ROWS = 2
HEADS = 3
DIM = 4


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


@pytest.mark.parametrize(("start", "size"), [(0, 6), (2, 3), (4, 5), (5, 1)])
def test_a_window_repeats_the_last_token(start: int, size: int) -> None:
    some = batch(6, 1)
    taken = some.window(start, size)
    for b, h in heads():
        check(taken, b, h, [int(some.positions[b, h, min(place, 5)]) for place in range(start, start + size)])


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
