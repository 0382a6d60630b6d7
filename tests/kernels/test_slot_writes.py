"""Writes to slots, against loops over rows, heads and tokens."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.kernels.slot_writes import flat_slots, gather_slots, put, write_slots

ROWS = 2
HEADS = 3
SLOTS = 5


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    """Numbers that differ everywhere."""
    return torch.arange(start, start + torch.Size(shape).numel()).view(shape)


@pytest.mark.parametrize("vector", [(), (2,), (0,), (2, 3)], ids=str)
def test_slots_are_those_of_each_head(vector: tuple[int, ...]) -> None:
    target = numbered(ROWS, HEADS, SLOTS, *vector)
    before = target.clone()
    slots = torch.tensor([[[4, 0], [1, 2], [3, 4]], [[0, 1], [2, 0], [4, 3]]])
    data = numbered(ROWS, HEADS, 2, *vector, start=1000)
    found = gather_slots(target, slots)
    write_slots(target, slots, data)
    for b in range(ROWS):
        for h in range(HEADS):
            for n, slot in enumerate(slots[b, h].tolist()):
                assert torch.equal(found[b, h, n], before[b, h, slot])
                before[b, h, slot] = data[b, h, n]
    assert torch.equal(target, before)
    assert flat_slots(slots, SLOTS).tolist() == [4, 0, 6, 7, 13, 14, 15, 16, 22, 20, 29, 28]
    assert flat_slots(slots[:1, :1], SLOTS).tolist() == [4, 0]


@pytest.mark.parametrize("vector", [(), (2,), (0,), (2, 3)], ids=str)
def test_a_token_of_each_head_is_written_with_an_index_and_without(vector: tuple[int, ...]) -> None:
    slots = torch.tensor([[[4], [1], [3]], [[0], [2], [4]]])
    data = numbered(ROWS, HEADS, 1, *vector, start=1000)
    written = [numbered(ROWS, HEADS, SLOTS, *vector) for _ in range(2)]
    write_slots(written[0], slots, data)
    write_slots(written[1], slots, data, flat_slots(slots, SLOTS))
    assert torch.equal(*written)
    assert torch.equal(gather_slots(written[0], slots), data)


MASKS = {
    "the first is masked": [False, True, True],
    "the last is masked": [True, True, False],
    "one is written": [False, False, True],
    "none is written": [False, False, False],
    "all are written": [True, True, True],
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("vector", [(), (2,)], ids=str)
def test_masked_tokens_are_not_written_wherever_they_point(name: str, vector: tuple[int, ...]) -> None:
    """Masked tokens point to a slot in use, and to a slot that another token is written to."""
    target = numbered(ROWS, HEADS, SLOTS, *vector)
    expected = target.clone()
    mask = torch.tensor(MASKS[name]).expand(ROWS, HEADS, 3).clone()
    mask[1, 2] = True
    slots = torch.tensor([3, 1, 4]).expand(ROWS, HEADS, 3).clone()
    slots[0, 1] = torch.where(mask[0, 1], slots[0, 1], 1)
    data = numbered(ROWS, HEADS, 3, *vector, start=1000)
    put(target, data, slots, mask)
    for b, h, n in mask.nonzero().tolist():
        expected[b, h, slots[b, h, n]] = data[b, h, n]
    assert torch.equal(target, expected)


def test_nothing_to_put_changes_nothing() -> None:
    target = numbered(ROWS, HEADS, SLOTS)
    before = target.clone()
    put(target, target[..., :0], torch.empty(ROWS, HEADS, 0, dtype=torch.int64), torch.ones(ROWS, HEADS, 0).bool())
    assert torch.equal(target, before)
