"""Attention to GEAR's codes, which are decoded in registers; plain functions that `kvpolicy.kernels.compiled` compiles.

`X` is the number of blocks, `r` the rank, `k` and `m` the number of outliers of a key channel in a block and of a
value; see `kvpolicy.codecs.gear.GEARCodes`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.kernels.compiled import apart
from kvpolicy.kernels.fused_elements import mix_elements, replace_channels, score_elements
from kvpolicy.kernels.fused_read import channel_group_parts
from kvpolicy.kernels.words import split


@apart
def score_gear(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    left: Tensor,
    right: Tensor,
    positions: Tensor,
    outliers: Tensor,
    queries: Tensor,
    bits: int,
) -> Tensor:
    """Products of queries with keys.

    Args:
        codes: [B, H, C, D'] uint8.
        scale: [B, H, X, D] fp32.
        zero: [B, H, X, D] fp32.
        left: [B, H, C, r] fp32.
        right: [B, H, X, r, D] fp32.
        positions: Positions of the outliers in their block, [B, H, X, k, D] fp32.
        outliers: [B, H, X, k, D] fp32.
        queries: [B, H, G, D] fp32.
        bits: Bits per code.

    Returns:
        [B, H, G, C] fp32.
    """
    blocks = scale.shape[2]
    left = left.unflatten(2, (blocks, -1))
    own = torch.arange(left.shape[3], device=codes.device).float()[:, None]
    parts: list[Tensor] = []
    for place in split(codes, bits):
        at = slice(place.channels.start, place.channels.stop)
        part = place.codes.float().unflatten(2, (blocks, -1)) * scale[:, :, :, None, at] + zero[:, :, :, None, at]
        part = _add_error(part, left, right[..., at])
        for number in range(outliers.shape[3]):
            is_outlier = positions[:, :, :, number, None, at] == own
            part = torch.where(is_outlier, outliers[:, :, :, number, None, at], part)
        parts.append(part)
    return score_elements(parts, queries)


@apart
def mix_gear(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    left: Tensor,
    right: Tensor,
    channels: Tensor,
    outliers: Tensor,
    weights: Tensor,
    bits: int,
) -> Tensor:
    """Weighted sums of values.

    Args:
        codes: [B, H, C, D'] uint8.
        scale: [B, H, C, groups] fp32.
        zero: [B, H, C, groups] fp32.
        left: [B, H, C, r] fp32.
        right: [B, H, X, r, D] fp32.
        channels: Channels of the outliers, [B, H, C, m] fp32.
        outliers: [B, H, C, m] fp32.
        weights: [B, H, G, C] fp32.
        bits: Bits per code.

    Returns:
        [B, H, G, D] fp32.
    """
    # Blocks of tokens are also the blocks that are summed; see `kvpolicy.kernels.fused_read`.
    left, channels, outliers = (t.unflatten(2, (right.shape[2], -1)) for t in (left, channels, outliers))
    parts: list[Tensor] = []
    for n, part in enumerate(channel_group_parts(codes, scale, zero, bits)):
        own = range(n * part.shape[-1], (n + 1) * part.shape[-1])
        part = _add_error(part.unflatten(2, left.shape[2:4]), left, right[..., own.start : own.stop])
        parts.append(replace_channels(part, own, channels, outliers))
    return mix_elements(parts, weights.unflatten(3, left.shape[2:4]))


def _add_error(part: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add the low-rank error, with coefficients [B, H, X, g, r] and bases [B, H, X, r, W], to [B, H, X, g, W]."""
    for rank in range(left.shape[-1]):
        part = part + left[..., rank, None] * right[:, :, :, rank, None]
    return part
