"""Codes survive their bytes, in the promised order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.kernels.packing import pack, packed_width, round_to_half, unpack, unpack_float
from tests.sampling import product


@given(st.integers(1, 16), st.integers(1, 40), st.integers(0, 2**32))
def test_round_trip(bits: int, width: int, seed: int) -> None:
    dtype = torch.uint8 if bits <= 8 else torch.int32
    codes = torch.randint(2**bits, (2, 3, width), dtype=dtype, generator=torch.Generator().manual_seed(seed))
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (2, 3, packed_width(width, bits))
    back = unpack(packed, bits, width)
    assert back.dtype == dtype and torch.equal(back, codes)
    if 8 % bits == 0 and width * bits % 8 == 0:
        assert torch.equal(unpack(packed, bits), codes)
    assert torch.equal(unpack_float(packed, bits, width), codes.float())


# A code is stored in parts of 1, 2, 4 and 8 bits.
@product("bits", range(1, 17), sample=[(bits,) for bits in (1, 2, 4, 7, 8, 11, 16)])
def test_compiled_code_unpacks_the_same(bits: int) -> None:
    """It joins the parts of a byte in another way."""
    torch.compiler.reset()
    packed = torch.randint(256, (2, 3, packed_width(13, bits)), dtype=torch.uint8)
    for function in (unpack, unpack_float):
        want = function(packed, bits, 13)
        got = torch.compile(function, backend="eager", fullgraph=True)(packed, bits, 13)
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_a_part_follows_the_other() -> None:
    """3 = 2 + 1: the low two bits of every code, then the high ones."""
    assert pack(torch.tensor([1, 2, 7, 4], dtype=torch.uint8), 3).tolist() == [0b00_11_10_01, 0b1100]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_a_byte_holds_channels_a_part_apart(bits: int) -> None:
    dim = 32
    width = dim * bits // 8
    codes = torch.randint(2**bits, (dim,), dtype=torch.uint8)
    packed = pack(codes, bits)
    for channel in range(dim):
        byte = channel % width
        place = channel // width
        assert (int(packed[byte]) >> (bits * place)) % 2**bits == int(codes[channel])


def test_rounding_is_that_of_fp16() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[every.isfinite()].float().sort().values
    between = (every[1:] + every[:-1]) / 2
    near = torch.cat([every, between, between.nextafter(every[1:]), between.nextafter(every[:-1])])
    assert torch.equal(round_to_half(near), near.half().float())
    x = torch.randn(10000) * 10 ** torch.linspace(-9, 4, 10000)
    assert torch.equal(round_to_half(x), x.half().float())
