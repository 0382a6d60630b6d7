"""Codes survive their bytes, in the promised order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.codecs.packing import pack, round_to_half, unpack


@given(st.sampled_from([2, 4, 8]), st.integers(1, 9), st.integers(0, 2**32))
def test_round_trip(bits: int, width: int, seed: int) -> None:
    shape = (2, 3, width * 8 // bits)
    codes = torch.randint(2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (2, 3, width)
    assert torch.equal(unpack(packed, bits), codes)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_byte_holds_channels_a_part_apart(bits: int) -> None:
    dim = 32
    width = dim * bits // 8
    codes = torch.randint(2**bits, (dim,), dtype=torch.uint8)
    packed = pack(codes, bits)
    for channel in range(dim):
        byte, place = channel % width, channel // width
        assert (int(packed[byte]) >> (bits * place)) % 2**bits == int(codes[channel])


def test_rounding_is_that_of_fp16() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[every.isfinite()].float().sort().values
    between = (every[1:] + every[:-1]) / 2
    near = torch.cat([every, between, between.nextafter(every[1:]), between.nextafter(every[:-1])])
    assert torch.equal(round_to_half(near), near.half().float())
    x = torch.randn(10000) * 10 ** torch.linspace(-9, 4, 10000)
    assert torch.equal(round_to_half(x), x.half().float())
