"""Writes to slots, against loops over rows, heads and tokens."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.kernels.slot_writes import flat_slots, gather_slots, put, write_slots
from tests.sampling import product

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


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int16, torch.int64, torch.bool]


def random(*shape: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Any values of a dtype."""
    if dtype.is_floating_point:
        return torch.randn(*shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


@product("dtype,vector,written", DTYPES, [(), (4,), (2, 3), (0,)], ["all", "some", "none", "one head"], ids=str)
def test_masked_tokens_are_not_written_wherever_they_point(
    dtype: torch.dtype, vector: tuple[int, ...], written: str
) -> None:
    """A head without any stays as it is."""
    generator = torch.Generator().manual_seed(0)
    target = random(ROWS, HEADS, SLOTS, *vector, dtype=dtype, generator=generator)
    data = random(ROWS, HEADS, 3, *vector, dtype=dtype, generator=generator)
    slots = torch.rand(ROWS, HEADS, SLOTS, generator=generator).argsort(-1)[..., :3]
    mask = torch.rand(ROWS, HEADS, 3, generator=generator) < {"all": 2, "none": -1}.get(written, 0.5)
    if written == "one head":
        mask[:, 0] = False
    slots = torch.where(mask, slots, slots[..., :1])  # a masked token may point to the slot of another
    expected = target.clone()
    for row, head, token in mask.nonzero().tolist():
        expected[row, head, slots[row, head, token]] = data[row, head, token]
    held = target.data_ptr()
    put(target, data, slots, mask)
    assert torch.equal(target, expected) and target.data_ptr() == held


def test_no_tokens_and_no_elements() -> None:
    target = torch.ones(1, 2, 3, 4)
    put(target, target[:, :, :0], torch.zeros(1, 2, 0, dtype=torch.int64), torch.ones(1, 2, 0, dtype=torch.bool))
    write_slots(torch.ones(1, 2, 3, 0), torch.zeros(1, 2, 1, dtype=torch.int64), torch.zeros(1, 2, 1, 0))
    assert (target == 1).all()


def test_a_buffer_that_is_not_contiguous_is_written_in_place_or_refused() -> None:
    """Writing to a copy would lose the tokens in silence."""
    buffer = torch.zeros(1, 2, 4, 3).mT
    write_slots(buffer, torch.zeros(1, 2, 1, dtype=torch.int64), torch.ones(1, 2, 1, 4))
    assert buffer[:, :, 0].eq(1).all() and buffer[:, :, 1:].eq(0).all()
    with pytest.raises(RuntimeError, match="view"):
        write_slots(buffer, torch.tensor([[[0, 1], [0, 1]]]), torch.ones(1, 2, 2, 4))
