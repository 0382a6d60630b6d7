"""Attention to codes whose numbers are decoded one by one, in registers.

Levels, outliers and low-rank terms cannot be folded out of a sum. Here they become elementwise operations on the codes,
and inductor makes one loop of them and of the sum, so that no decoded number is written to memory.

Masks compare fp32 numbers: on a CPU, inductor (torch 2.13) converts masks of integers and of bytes slowly.

`B` rows, `H` KV heads, `C` slots, `G` query heads of each KV head, `D` channels, `W` words or bytes of codes. The parts
of decoded vectors are [B, H, *S, W] each, where `S` are the slots C, or blocks of slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.kernels.compiled import apart
from kvpolicy.kernels.fused_read import sum_slots
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
