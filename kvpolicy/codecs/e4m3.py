"""Quantization of the channels of a token to fp8: numbers of e4m3, with one scale for each group of channels."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.codecs.common import add_rest
from kvpolicy.codecs.uniform import FP16
from kvpolicy.kernels.compiled import call, is_compiled
from kvpolicy.kernels.fused_elements import BITS, LARGEST, from_e4m3, mix_e4m3, score_e4m3, to_e4m3
from kvpolicy.kernels.fused_read import in_blocks
from kvpolicy.kernels.packing import round_to_half
from kvpolicy.kernels.words import as_words, in_order_of_channels, in_order_of_places


def quantize(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Quantize groups of `size` neighboring elements of the last dimension, up to their largest absolute value.

    Args:
        x: [..., D] fp32.
        size: Elements per group, a divisor of D.

    Returns:
        Codes [..., D] uint8; scales [..., D / size] fp16.
    """
    if x.dim() == 4 and not torch.compiler.is_compiling() and is_compiled(x):
        return call(quantize, x, size=size)  # this function again, in one pass
    grouped = x.unflatten(-1, (-1, size))
    scale = round_to_half((grouped.abs().amax(-1, keepdim=True) / LARGEST).clamp(max=FP16))
    code = to_e4m3(grouped / scale.masked_fill(scale == 0, 1)).flatten(-2)
    return code, scale.squeeze(-1).half()


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """Undo `quantize`, [..., D] fp32."""
    return (from_e4m3(codes).unflatten(-1, (scale.shape[-1], -1)) * scale.float()[..., None]).flatten(-2)


def score_fused(codes: Tensor, scale: Tensor, queries: Tensor) -> Tensor:
    """Products of queries with what `dequantize` makes of codes, without decoding them.

    Args:
        codes: [B, H, C, D] uint8.
        scale: [B, H, C, groups].
        queries: [B, H, G, D].

    Returns:
        [B, H, G, C] fp32.
    """
    queries = queries.float()
    words = as_words(codes, BITS, queries.shape[-1] // scale.shape[-1])
    return call(score_e4m3, words, scale, in_order_of_places(queries, words))


def mix_fused(codes: Tensor, scale: Tensor, weights: Tensor) -> Tensor:
    """Sums of what `dequantize` makes of codes, weighted by [B, H, G, C], as `score_fused`; [B, H, G, D] fp32."""
    words = as_words(codes, BITS, codes.shape[-1] // scale.shape[-1], sums_slots=True)
    mixed = call(mix_e4m3, in_blocks(words), in_blocks(scale), in_blocks(weights.float(), 3))

    def values(at: slice) -> Tensor:
        return dequantize(codes[:, :, at], scale[:, :, at])

    return add_rest(in_order_of_channels(mixed, words), values, weights)
