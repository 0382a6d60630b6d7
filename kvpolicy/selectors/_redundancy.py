"""Which tokens repeat others: the mean cosine of each key with all keys, without an N x N matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_ELEMENTS = 1 << 20
"""Cosines in one tile: 4 MiB of fp32."""


def mean_cosines(keys: Tensor, valid: Tensor, similar: float) -> Tensor:
    """The mean cosine of each key with the keys of its head, of which every key leaves out the latest similar one.

    The latest of several similar tokens thus counts as less redundant than the others.

    Args:
        keys: By ascending position, [B, H, N, D].
        valid: Which of them are tokens, [B, H, N] bool.
        similar: The cosine above which two keys are similar.

    Returns:
        [B, H, N] fp32; 0 for what is no token.
    """
    # Not a product with the mask: what is no token may hold inf or NaN.
    unit = F.normalize(keys.float().masked_fill(~valid[..., None], 0), dim=-1)
    batch, heads, tokens, _ = unit.shape
    rows = max(TILE_ELEMENTS // max(batch * heads * tokens, 1), 16)
    column = torch.arange(tokens, device=keys.device)
    number = torch.arange(1, tokens + 1, device=keys.device, dtype=torch.float32)
    total = unit.new_zeros(batch, heads, tokens)
    for start in range(0, tokens, rows):
        tile = unit[:, :, start : start + rows] @ unit.mT
        own = column[start : start + rows]
        tile[:, :, own - start, own] = 0
        latest = (number * (tile > similar)).amax(-1, keepdim=True)  # 0 where no key is similar
        total += tile.masked_fill_(number == latest, 0).sum(2)
    return total / valid.sum(-1, keepdim=True).clamp_min(1)
