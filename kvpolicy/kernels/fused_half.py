"""Attention to vectors of fp16, which loops on a CPU read two numbers at a time.

Inductor (torch 2.13) converts fp16 so slowly on a CPU that it takes most of the time of a loop. So pairs of numbers are
loaded as one fp32 number, as codes are (see `kvpolicy.kernels.words`), and converted by their bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.kernels.compiled import apart
from kvpolicy.kernels.fused_elements import mix_elements, score_elements

HALVES = 2
"""Numbers in a pair."""


def as_pairs(t: Tensor) -> Tensor:
    """Vectors of fp16 [B, H, C, D], without inf, as pairs [B, H, C, D / 2] fp32 where these are read faster."""
    is_whole = t.shape[-1] % 2 == 0 and t.stride(-1) == 1 and all(stride % 2 == 0 for stride in t.stride()[:-1])
    return t.view(torch.float32) if is_whole and t.device.type == "cpu" else t


@apart
def score_half(vectors: Tensor, queries: Tensor) -> Tensor:
    """Products of queries with vectors.

    Args:
        vectors: By `as_pairs`.
        queries: By `in_order_of_places` of `HALVES`, [B, H, G, D] fp32.

    Returns:
        [B, H, G, C] fp32.
    """
    return score_elements(_parts(vectors), queries)


@apart
def mix_half(vectors: Tensor, weights: Tensor) -> Tensor:
    """Sums of vectors [B, H, *S, W], by `as_pairs`, weighted by [B, H, G, *S] fp32.

    Returns:
        In the order of places, [B, H, G, D] fp32.
    """
    return mix_elements(_parts(vectors), weights)


def _parts(vectors: Tensor) -> list[Tensor]:
    if vectors.dtype == torch.float16:
        return [vectors.float()]
    pairs = vectors.view(torch.int32)
    return [_from_bits(pairs), _from_bits(pairs >> 16)]


def _from_bits(bits: Tensor) -> Tensor:
    """The number of fp16 in the low 16 bits of int32, as fp32; finite numbers alone."""
    # Its exponent counts from 112 less than that of fp32. The product makes up for it, also for subnormal numbers.
    moved = ((bits & 0x7FFF) << 13) | ((bits & 0x8000) << 16)
    return moved.view(torch.float32) * 2.0**112
