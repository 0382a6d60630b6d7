"""Attention to codes whose numbers are decoded one by one, in registers.

Levels, outliers and low-rank terms cannot be folded out of a sum. Here they become elementwise operations on the codes,
and inductor makes one loop of them and of the sum, so that no decoded number is written to memory.

Masks compare fp32 numbers: on a CPU, inductor (torch 2.13) converts masks of integers and of bytes slowly.

Vectors of fp16 are read so on a GPU only, where the loop that converts a number is the one that multiplies it. On a
CPU, inductor (torch 2.13) converts fp16 number by number, and the same takes several times as long as a conversion of
some thousand vectors at a time with a product of matrices.

Numbers of e4m3, the fp8 format with 4 bits of exponent and 3 of mantissa, are made and read with integer arithmetic,
because older GPUs lack the dtype.

`B` rows, `H` KV heads, `C` slots, `G` query heads of each KV head, `D` channels, `W` words or bytes of codes. The parts
of decoded vectors are [B, H, *S, W] each, where `S` are the slots C, or blocks of slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.kernels.compiled import apart, is_compiled
from kvpolicy.kernels.fused_read import mix_places, score_places, sum_slots
from kvpolicy.kernels.words import Place, split

UNROLLED = 12
"""The most outliers and low-rank terms of a number together that codecs decode so: the code of each is repeated."""


def score_elements(parts: Sequence[Tensor], queries: Tensor) -> Tensor:
    """Products of queries [B, H, G, D] fp32, in the order of the parts, with decoded keys, [B, H, G, C] fp32."""
    width = parts[0].shape[-1]
    scores: list[Tensor] = []
    for g in range(queries.shape[2]):
        query = queries[:, :, g].reshape(*queries.shape[:2], *[1] * (parts[0].dim() - 3), -1)
        products = [part * query[..., n * width : (n + 1) * width] for n, part in enumerate(parts)]
        # Added before they are summed over channels, which is slower.
        scores.append(sum(products[1:], products[0]).sum(-1).flatten(2))
    return torch.stack(scores, 2)


def mix_elements(parts: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Sums of decoded values, weighted by [B, H, G, *S] fp32, in the order of the parts, [B, H, G, D] fp32."""
    blocked = parts[0].dim() > 4
    mixed: list[Tensor] = []
    for g in range(weights.shape[2]):
        own = weights[:, :, g, ..., None]
        mixed += [sum_slots(part * own, blocked) for part in parts]
    return torch.cat(mixed, -1).unflatten(-1, (weights.shape[2], -1))


def levels_of(place: Place, levels: Tensor, bits: int) -> Tensor:
    """Levels of the codes at one place, [..., W] fp32; `levels` [1, 1, 2^bits] fp32."""
    # By bits and not by index: inductor would read each level from memory by itself.
    return _select(place.codes, levels[0, 0].unbind(), bits)


def _select(code: Tensor, levels: Sequence[float | Tensor], bits: int) -> Tensor:
    chosen = list(levels)
    for bit in range(bits):
        is_set = (code & 2**bit).float() != 0
        chosen = [torch.where(is_set, high, low) for low, high in zip(chosen[::2], chosen[1::2], strict=True)]
    out = chosen[0]
    assert isinstance(out, Tensor)
    return out


@apart
def score_levels(codes: Tensor, levels: Tensor, queries: Tensor, bits: int) -> Tensor:
    """Products of queries with the levels of codes.

    Args:
        codes: [B, H, C, W], by `as_words`.
        levels: The level of each code, [1, 1, 2^bits] fp32.
        queries: In the order of places, [B, H, G, D] fp32.
        bits: Bits per code, 1 to 4.

    Returns:
        [B, H, G, C] fp32.
    """
    return score_elements([levels_of(place, levels, bits) for place in split(codes, bits)], queries)


@apart
def decode_levels(
    codes: Tensor, levels: Tensor, scale: Tensor, zero: Tensor, channels: Tensor, outliers: Tensor, bits: int
) -> Tensor:
    """Vectors of which the codes are levels, scaled, with outliers in full.

    Args:
        codes: [B, H, n, D'] uint8.
        levels: The level of each code, [1, 1, 2^bits] fp32.
        scale: [B, H, n, 1], or [1, H or 1, 1, D], fp32.
        zero: Like `scale`.
        channels: Channels of the outliers, [B, H, n, m] fp32, distinct within a vector.
        outliers: [B, H, n, m] fp32.
        bits: Bits per code, 1 to 4.

    Returns:
        [B, H, n, D] fp32.
    """
    return torch.cat(_level_parts(codes, levels, scale, zero, channels, outliers, bits), -1)


@apart
def mix_levels(
    codes: Tensor,
    levels: Tensor,
    scale: Tensor,
    zero: Tensor,
    channels: Tensor,
    outliers: Tensor,
    weights: Tensor,
    bits: int,
) -> Tensor:
    """Sums of what `decode_levels` decodes, of slots or blocks of slots, weighted by [B, H, G, *S] fp32.

    Returns:
        In the order of places, [B, H, G, D] fp32.
    """
    return mix_elements(_level_parts(codes, levels, scale, zero, channels, outliers, bits), weights)


def _level_parts(
    codes: Tensor, levels: Tensor, scale: Tensor, zero: Tensor, channels: Tensor, outliers: Tensor, bits: int
) -> list[Tensor]:
    parts: list[Tensor] = []
    for place in split(codes, bits):
        own = place.channels
        at = slice(own.start, own.stop, own.step) if scale.shape[-1] > 1 else slice(None)
        part = levels_of(place, levels, bits) * scale[..., at] + zero[..., at]
        parts.append(replace_channels(part, own, channels, outliers))
    return parts


def replace_channels(part: Tensor, own: range, channels: Tensor, outliers: Tensor) -> Tensor:
    """Decoded vectors with their outliers.

    Args:
        part: [B, H, *S, W] fp32.
        own: The channels of the part.
        channels: Channels of the outliers, [B, H, *S, m], distinct within a vector.
        outliers: [B, H, *S, m].
    """
    numbers = torch.arange(own.start, own.stop, own.step, device=part.device).float()
    for number in range(channels.shape[-1]):
        part = torch.where(channels[..., number, None] == numbers, outliers[..., number, None], part)
    return part


def is_read_whole(vectors: Tensor) -> bool:
    """Whether vectors of fp16 [B, H, C, D] are read by these functions, compiled."""
    return vectors.device.type != "cpu" and is_compiled(vectors)


@apart
def score_half(vectors: Tensor, queries: Tensor) -> Tensor:
    """Products of queries [B, H, G, D] fp32 with vectors [B, H, C, D] fp16, [B, H, G, C] fp32."""
    return score_elements([vectors.float()], queries)


@apart
def mix_half(vectors: Tensor, weights: Tensor) -> Tensor:
    """Sums of vectors [B, H, *S, D] fp16, weighted by [B, H, G, *S] fp32, [B, H, G, D] fp32."""
    return mix_elements([vectors.float()], weights)


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
