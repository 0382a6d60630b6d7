"""Uniform quantization of the channels of a token: one scale and one zero for each group of channels."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.codecs.common import add_rest, is_empty_head
from kvpolicy.kernels.compiled import call, is_compiled, widen
from kvpolicy.kernels.fused_read import in_blocks, mix_channel_groups, score_channel_groups
from kvpolicy.kernels.packing import fills_bytes, pack, round_to_half, unpack_float
from kvpolicy.kernels.products import matmul
from kvpolicy.kernels.words import HAS_WIDE_VECTORS, as_words, in_order_of_channels, in_order_of_places

FP16 = torch.finfo(torch.float16).max
"""The largest number of fp16."""


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`.

    >>> largest_divisor(80, 32), largest_divisor(7, 4)
    (20, 1)
    """
    return max(size for size in range(1, min(most, number) + 1) if number % size == 0)


def quantize(x: Tensor, bits: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize groups of `size` neighboring elements of the last dimension, from their minimum to their maximum.

    A group of equal elements has scale and code 0. Elements beyond the range of fp16 are clipped.

    Args:
        x: [..., D] fp32.
        bits: Bits per code, 1 to 8.
        size: Elements per group, a divisor of D.

    Returns:
        Codes [..., packed_width(D, bits)] uint8; scales and zeros [..., D / size] fp16.

    >>> codes, scale, zero = quantize(torch.tensor([-1.0, 2.0, 5.0, 5.0]), 2, 2)
    >>> scale.tolist(), zero.tolist()
    ([1.0, 0.0], [-1.0, 5.0])
    >>> dequantize(codes, scale, zero, 2, 4).tolist()
    [-1.0, 2.0, 5.0, 5.0]
    """
    if x.dim() == 4 and not torch.compiler.is_compiling() and is_compiled(x):
        return call(quantize, x, bits=bits, size=size)  # this function again, in one pass
    grouped = x.float().unflatten(-1, (-1, size))
    least, most = torch.aminmax(grouped, dim=-1, keepdim=True)
    scale, zero = scale_and_zero(least, most, bits)
    code = encode(grouped, scale, zero, bits)
    return pack(code.flatten(-2), bits), scale.squeeze(-1).half(), zero.squeeze(-1).half()


def scale_and_zero(least: Tensor, most: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and zero of groups with the given minimum and maximum: fp32, rounded to fp16 and clipped to its range."""
    scale = (most - least) / (2**bits - 1)
    return round_to_half(scale.clamp(max=FP16)), round_to_half(least.clamp(-FP16, FP16))


def encode(x: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Codes of `x` under a stored scale and zero, clipped to [0, 2**bits); 0 where the scale is 0.

    They are uint8, and int32 in compiled code, where `pack` takes bytes more slowly.
    """
    flat = scale == 0
    code = ((x - zero) / scale.masked_fill(flat, 1)).round().clamp(0, 2**bits - 1).masked_fill(flat, 0)
    return code.to(torch.int32 if torch.compiler.is_compiling() else torch.uint8)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor, bits: int, width: int) -> Tensor:
    """Undo `quantize`.

    Args:
        codes: Packed codes, [..., bytes] uint8.
        scale: [..., groups] fp16.
        zero: [..., groups] fp16.
        bits: Bits per code.
        width: The number of elements, D.

    Returns:
        [..., width] fp32.
    """
    grouped = unpack_float(codes, bits, width).unflatten(-1, (scale.shape[-1], -1))
    return grouped.mul_(scale[..., None]).add_(zero[..., None]).flatten(-2)  # in fp32, as the codes are


def is_fused(codes: Tensor, bits: int, width: int, page_slots: int | None = None) -> bool:
    """Whether `score_fused` and `mix_fused` read codes [B, H, C, bytes] of `width` channels.

    They must be many, and fill their bytes. See `StageStore` for `page_slots`.
    """
    if (
        bits == 8
        and codes.device.type == "cpu"
        and not HAS_WIDE_VECTORS
        and as_words(codes, bits, sums_slots=True) is codes
    ):
        return False  # single bytes are decoded in less time
    return is_compiled(codes, page_slots) and fills_bytes(codes, bits, width)


def score_fused(codes: Tensor, scale: Tensor, zero: Tensor, queries: Tensor, bits: int) -> Tensor:
    """Products of queries with what `dequantize` makes of codes, without decoding them.

    Args:
        codes: [B, H, C, bytes] uint8.
        scale: [B, H, C, groups].
        zero: [B, H, C, groups], or [B, H, C, 0] if there is none.
        queries: [B, H, G, D].
        bits: Bits per code.

    Returns:
        [B, H, G, C] fp32.
    """
    groups = scale.shape[-1]
    queries = queries.float()
    words = as_words(codes, bits, queries.shape[-1] // groups)
    sums = queries.unflatten(-1, (groups, -1)).sum(-1)
    return call(score_channel_groups, words, scale, zero, in_order_of_places(queries, words), sums, bits=bits)


def mix_fused(codes: Tensor, scale: Tensor, zero: Tensor, weights: Tensor, bits: int) -> Tensor:
    """Sums of what `dequantize` makes of codes, weighted by [B, H, G, C], as `score_fused`; [B, H, G, D] fp32."""
    width = codes.shape[-1] * 8 // bits
    size = width // scale.shape[-1]
    words = as_words(codes, bits, size, sums_slots=True)
    own = weights.float()
    # On a CPU, zeros are summed by a product: inductor would sum over as few numbers as groups one by one.
    by_product = zero.shape[-1] > 0 and zero.device.type == "cpu"
    in_loop = zero[..., :0] if by_product else zero
    mixed = call(mix_channel_groups, *map(in_blocks, (words, scale, in_loop)), in_blocks(own, 3), bits=bits)

    def without_zero(at: slice) -> Tensor:
        return dequantize(codes[:, :, at], scale[:, :, at], torch.zeros_like(scale[:, :, at]), bits, width)

    mixed = add_rest(in_order_of_channels(mixed, words), without_zero, weights)
    return mixed + matmul(widen(zero).mT, own.mT).mT.repeat_interleave(size, -1) if by_product else mixed


def channel_absmax(x: Tensor, write_mask: Tensor) -> Tensor:
    """The largest absolute value of each channel of `x` [B, H, n, D] over the tokens that are written.

    Returns:
        [B, H, 1, D]; 0 in heads without such a token.
    """
    return x.abs().masked_fill(~write_mask[..., None], 0).amax(2, keepdim=True)


def freeze_scale(stored: Tensor, fitted: Tensor, write_mask: Tensor, occupied: Tensor) -> Tensor:
    """Store newly fitted scales per sequence in heads without an occupied slot; the other heads keep theirs.

    Args:
        stored: Scales of each head, [B, H, 1, D] fp16; modified in place.
        fitted: Scales fitted to the tokens that are written, [B, H, 1, D] fp32, rounded to fp16.
        write_mask: Which tokens are written, [B, H, n] bool.
        occupied: Which slots are occupied, [B, H, C] bool.

    Returns:
        The scales in effect, [B, H, 1, D] fp32.
    """
    scale = torch.where(is_empty_head(write_mask, occupied), fitted, stored.float())
    stored.copy_(scale)
    return scale
