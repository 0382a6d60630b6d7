"""How many of the newest queries attend to a token less than to the mean token, counted without an N x N matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.attention import (
    Past,
    QueryWindow,
    ScoreTransform,
    newest_columns,
    window_attention,
    window_tiles,
)
from kvpolicy.engine.statistic import Candidates, Coming, WindowStatistic, newest_of
from kvpolicy.protocols import BELOW_MEAN


@dataclass(frozen=True)
class BelowMean(WindowStatistic):
    """How many of the newest queries attend to a token less than to the mean of the tokens that they see.

    Attributes:
        width: How many queries of each row.
        window: The queries so far; None before a prompt.
    """

    width: int
    window: QueryWindow | None = None

    def columns(self, coming: Coming) -> Tensor:
        """The newest columns."""
        return newest_columns(coming.valid, coming.shape, self.width, coming.seen.device)

    def newest(self, window: QueryWindow) -> QueryWindow:
        """As many as in one piece."""
        return newest_of(window, self.width)

    def reduced(self, candidates: Candidates) -> Mapping[str, Any]:
        """Counts of the queries, and how many tokens the prompt adds."""
        assert self.window is not None
        keys, valid, transform, past, added = candidates[:5]
        return {"below_mean": below_mean_counts(self.window, keys, transform, past, valid), "added": added}


def below_mean_counts(
    window: QueryWindow, k: Tensor, transform: ScoreTransform, past: Past | None, valid: Tensor | None
) -> Tensor:
    """Count the queries of a window that give a token less than the mean of the tokens that they see.

    Args:
        window: The queries.
        k: New keys, [B, H, P, D].
        transform: From products to attention weights.
        past: Slots that come before them, or None.
        valid: Which of the P tokens are not padding, [B, P] bool; None if all are.

    Returns:
        [B, Hq, S + P] fp32, over past slots and new tokens.
    """
    batch, heads = window.queries.shape[:2]
    held = 0 if past is None else past.keys.shape[2]
    total = k.new_zeros(batch, heads, held + k.shape[2], dtype=torch.float32)
    for _, tile in window_tiles(window, total.shape[2]):
        seen = _visible(tile, k, past, valid).repeat_interleave(heads // k.shape[1], 1)  # [B, Hq, W, S + P]
        weights = window_attention(tile, k, transform, past, valid)
        total += (weights.mul_(seen.sum(-1, keepdim=True)).lt(BELOW_MEAN) & seen).sum(2)
    return total


def _visible(window: QueryWindow, k: Tensor, past: Past | None, valid: Tensor | None) -> Tensor:
    """Which past slots and new tokens each query sees, [B, H, W, S + P] bool."""
    heads, new = k.shape[1:3]
    seen = torch.arange(new, device=k.device) <= window.at[..., None]  # none where a query is absent, at -1
    if valid is not None:
        seen = seen & valid[:, None]
    every = seen[:, None].expand(-1, heads, -1, -1)
    if past is None:
        return every
    there = (window.at >= 0)[:, None, :, None] & past.occupied[:, :, None]
    return torch.cat([there, every], -1)
