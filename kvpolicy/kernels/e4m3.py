"""Numbers of e4m3, the fp8 format with 4 bits of exponent and 3 of mantissa, and attention to them.

They are made and read with integer arithmetic, because older GPUs lack the dtype.

`B` rows, `H` KV heads, `C` slots, `G` query heads of each KV head, `D` channels, `W` words or bytes of codes; see
`kvpolicy.kernels.fused_read`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.kernels.compiled import apart
from kvpolicy.kernels.fused_read import mix_places, score_places
from kvpolicy.kernels.words import split

LARGEST = 448.0
"""The largest number of e4m3."""

BITS = 8
"""Bits of a number."""


def to_e4m3(x: Tensor) -> Tensor:
    """Round fp32 numbers to e4m3, to nearest, ties to even, clamped to its range; returns the bytes.

    >>> to_e4m3(torch.tensor([1.0, -448.0, 1e9])).tolist()
    [56, 254, 126]
    """
    # The mantissa loses 20 of its 23 bits, rounded as in `round_to_half`, and the bias of the exponent changes from 127
    # to 7.
    size = x.abs().clamp(max=LARGEST)
    raw = size.view(torch.int32)
    normal = ((raw + 0x7FFFF + ((raw >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormal numbers of e4m3 are multiples of 2^-9.
    subnormal = (size * 2.0**9).round().int()
    return (torch.where(size < 2.0**-6, subnormal, normal) | (x < 0).int() << 7).to(torch.uint8)


def from_e4m3(code: Tensor) -> Tensor:
    """Undo `to_e4m3`, in few passes over memory."""
    # Without its sign, a code is the upper part of an fp16 number. The bias of the exponent is 7 instead of 15, hence
    # the factor 2^8.
    raw = code.to(torch.int16)
    return (((raw & 0x80) << 8) | ((raw & 0x7F) << 7)).view(torch.float16).float() * 256


def _in_registers(code: Tensor) -> Tensor:
    """The same as `from_e4m3` of uint8 or int32, within a loop: inductor converts fp16 slowly on a CPU."""
    code = code.int()
    # Without its sign, a code is the upper part of an fp32 number, whose bias is 127.
    size = (((code & 0x7F) << 20) + (120 << 23)).view(torch.float32)
    # With exponent 0, m / 8 was read as (1 + m / 8) / 2^7, and stands for m / 2^9; otherwise the first is smaller.
    size = size.minimum(2 * size - 2.0**-6)
    return ((code & 0x80) << 24 | size.view(torch.int32)).view(torch.float32)


@apart
def score_e4m3(codes: Tensor, scale: Tensor, queries: Tensor) -> Tensor:
    """Products of queries with numbers of e4m3 that have a scale for each group of channels of a token.

    Args:
        codes: [B, H, C, W], by `as_words`.
        scale: [B, H, C, groups].
        queries: In the order of places, [B, H, G, D] fp32.

    Returns:
        [B, H, G, C] fp32.
    """
    places = split(codes, BITS)
    numbers = [_in_registers(place.codes) for place in places]
    return score_places(places, numbers, scale, scale[..., :0], queries, queries[..., :0])


@apart
def mix_e4m3(codes: Tensor, scale: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of numbers of e4m3 that have a scale for each group of channels of a token.

    Args:
        codes: [B, H, *S, W], by `as_words`.
        scale: [B, H, *S, groups].
        weights: [B, H, G, *S] fp32.

    Returns:
        In the order of places, [B, H, G, D] fp32.
    """
    places = split(codes, BITS)
    return mix_places(places, [_in_registers(place.codes) for place in places], scale, scale[..., :0], weights)
