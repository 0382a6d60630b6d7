"""Tokens are read back from blocks, however a backend arranges them, or the backend is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvpolicy import KVPolicyError
from kvpolicy_vllm.blocks import BlockReader

BLOCKS = 5
SIZE = 16
HEADS = 2
DIM = 8
Place = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Views of a cache as keys and values, [blocks, tokens, H, D] each."""


def split(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys in front of values in every block, heads first, as on a CPU."""
    keys, values = cache.chunk(2, 2)
    return keys.transpose(1, 2), values.transpose(1, 2)


def paired(cache: Tensor) -> tuple[Tensor, Tensor]:
    """All keys in front of all values."""
    return cache[0], cache[1]


def side_by_side(cache: Tensor) -> tuple[Tensor, Tensor]:
    """The value of a token behind its key."""
    return cache[..., :DIM], cache[..., DIM:]


def small_blocks(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Each block as two blocks of the backend."""
    keys, values = cache.unflatten(0, (BLOCKS, 2)).unbind(3)
    return keys.flatten(1, 2), values.flatten(1, 2)


def by_channel(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys channel by channel."""
    return cache[:, 0].permute(0, 3, 1, 2), cache[:, 1].permute(0, 3, 1, 2)


ARRANGEMENTS: dict[str, tuple[tuple[int, ...], Place]] = {
    "split": ((BLOCKS, HEADS, 2 * SIZE, DIM), split),
    "paired": ((2, BLOCKS, SIZE, HEADS, DIM), paired),
    "side by side": ((BLOCKS, SIZE, HEADS, 2 * DIM), side_by_side),
    "small blocks": ((2 * BLOCKS, SIZE // 2, 2, HEADS, DIM), small_blocks),
    "by channel": ((BLOCKS, 2, HEADS, DIM, SIZE), by_channel),
}


def writes_to(cache: Tensor, place: Place, code: Callable[[Tensor], Tensor] = lambda t: t) -> Callable[..., None]:
    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        for view, new in zip(place(cache), (keys, values), strict=True):
            view[slots // SIZE, slots % SIZE] = code(new)

    return write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_what_is_written_is_read(name: str, dtype: torch.dtype) -> None:
    shape, place = ARRANGEMENTS[name]
    cache = torch.zeros(shape, dtype=dtype)
    write = writes_to(cache, place)
    reader = BlockReader(cache, BLOCKS, (SIZE, HEADS, DIM), write)
    assert not cache.any()  # what was tried is gone
    generator = torch.Generator().manual_seed(0)
    for blocks, tokens in (([3], 1), ([3, 1], 16), ([4, 2], 17), ([1, 4, 2], 48), ([2, 3, 1], 33)):
        keys, values = torch.randn(2, tokens, HEADS, DIM, generator=generator).to(dtype)
        slots = torch.tensor([blocks[at // SIZE] * SIZE + at % SIZE for at in range(tokens)])
        write(keys, values, slots)
        found = reader.read(blocks, tokens)
        assert torch.equal(found[0], keys.transpose(0, 1)) and torch.equal(found[1], values.transpose(0, 1))


def test_a_cache_whose_other_sizes_are_those_of_its_blocks() -> None:
    cache = torch.zeros(2, 2, 2 * SIZE, DIM)
    write = writes_to(cache, split)
    reader = BlockReader(cache, 2, (SIZE, 2, DIM), write)
    keys = torch.randn(SIZE, 2, DIM)
    write(keys, -keys, torch.arange(SIZE, 2 * SIZE))
    assert torch.equal(reader.read([1], SIZE)[1], -keys.transpose(0, 1))


@pytest.mark.parametrize(
    "code",
    [
        lambda t: t / 448,
        lambda t: t.clamp(max=7),
        torch.zeros_like,
        lambda t: t + 1,
        lambda t: torch.where(t < 60, t + 0.25, t),
        lambda t: t.flip(0) * 0 + 5,
    ],
    ids=["scaled", "clamped", "nothing", "shifted", "inexact", "constant"],
)
def test_codes_are_refused(code: Callable[[Tensor], Tensor]) -> None:
    cache = torch.zeros(BLOCKS, HEADS, 2 * SIZE, DIM)
    with pytest.raises(KVPolicyError, match="store keys and values as they are"):
        BlockReader(cache, BLOCKS, (SIZE, HEADS, DIM), writes_to(cache, split, code))
    assert not cache.any()
