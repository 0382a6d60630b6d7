"""`put` writes what a scatter that skips masked tokens would write, in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.codecs.common import put
from kvpolicy.kernels.slot_writes import write_slots
from tests.sampling import product

BATCH = 2
HEADS = 3
SLOTS = 11
TOKENS = 5
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int16, torch.int64, torch.bool]


def random(*shape: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Any values of a dtype."""
    if dtype.is_floating_point:
        return torch.randn(*shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


def expected(target: Tensor, data: Tensor, slots: Tensor, mask: Tensor) -> Tensor:
    """One token at a time."""
    want = target.clone()
    for row, head, token in mask.nonzero().tolist():
        want[row, head, slots[row, head, token]] = data[row, head, token]
    return want


@product("dtype,vector,written", DTYPES, [(), (4,), (2, 3), (0,)], ["all", "some", "none", "one head"], ids=str)
def test_put(dtype: torch.dtype, vector: tuple[int, ...], written: str) -> None:
    """Masked tokens are not written, and a head without any stays as it is."""
    generator = torch.Generator().manual_seed(0)
    target = random(BATCH, HEADS, SLOTS, *vector, dtype=dtype, generator=generator)
    data = random(BATCH, HEADS, TOKENS, *vector, dtype=dtype, generator=generator)
    slots = torch.rand(BATCH, HEADS, SLOTS, generator=generator).argsort(-1)[..., :TOKENS]
    mask = torch.rand(BATCH, HEADS, TOKENS, generator=generator) < {"all": 2, "none": -1}.get(written, 0.5)
    if written == "one head":
        mask[:, 0] = False
    slots = torch.where(mask, slots, slots[..., :1])  # a masked token may point to the slot of another
    want = expected(target, data, slots, mask)
    held = target.data_ptr()
    put(target, data, slots, mask)
    assert torch.equal(target, want) and target.data_ptr() == held


def test_no_tokens_and_no_elements() -> None:
    target = torch.ones(1, 2, 3, 4)
    put(target, torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 0, dtype=torch.int64), torch.ones(1, 2, 0, dtype=torch.bool))
    write_slots(torch.ones(1, 2, 3, 0), torch.zeros(1, 2, 1, dtype=torch.int64), torch.zeros(1, 2, 1, 0))
    assert (target == 1).all()


def test_a_buffer_that_is_not_contiguous_is_written_in_place_or_refused() -> None:
    """Writing to a copy would lose the tokens in silence."""
    buffer = torch.zeros(1, 2, 4, 3).mT
    write_slots(buffer, torch.zeros(1, 2, 1, dtype=torch.int64), torch.ones(1, 2, 1, 4))
    assert buffer[:, :, 0].eq(1).all() and buffer[:, :, 1:].eq(0).all()
    with pytest.raises(RuntimeError, match="view"):
        write_slots(buffer, torch.tensor([[[0, 1], [0, 1]]]), torch.ones(1, 2, 2, 4))
