"""Attention that each token receives, of which newer queries count more, without an N x N matrix."""

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
from kvpolicy.protocols import Decay


@dataclass(frozen=True)
class DecayedSum(WindowStatistic):
    """Attention summed over the newest queries, each times a factor for every query behind it.

    Attributes:
        decay: How many queries of each row, and the factor.
        window: The queries so far; None before a prompt.
    """

    decay: Decay
    window: QueryWindow | None = None

    def columns(self, coming: Coming) -> Tensor:
        """The newest columns."""
        return newest_columns(coming.valid, coming.shape, self.decay.queries, coming.seen.device)

    def newest(self, window: QueryWindow) -> QueryWindow:
        """As many as in one piece."""
        return newest_of(window, self.decay.queries)

    def reduced(self, candidates: Candidates) -> Mapping[str, Any]:
        """The sums, and how many tokens the prompt adds."""
        assert self.window is not None
        keys, valid, transform, past, added = candidates[:5]
        sums = decayed_sums(self.window, self.decay.factor, keys, transform, past, valid)
        return {"decayed_sum": sums, "added": added}


def decayed_sums(
    window: QueryWindow, factor: float, k: Tensor, transform: ScoreTransform, past: Past | None, valid: Tensor | None
) -> Tensor:
    """Attention of a window of queries, each of them times `factor` for every query behind it.

    Args:
        window: The queries, the newest last.
        factor: Of each query over that of the next one.
        k: New keys, [B, H, P, D].
        transform: From products to attention weights.
        past: Slots that come before them, or None.
        valid: Which of the P tokens are not padding, [B, P] bool; None if all are.

    Returns:
        [B, Hq, S + P] fp32, over past slots and new tokens.
    """
    batch, heads, width, _ = window.queries.shape
    held = 0 if past is None else past.keys.shape[2]
    total = k.new_zeros(batch, heads, held + k.shape[2], dtype=torch.float32)
    share = torch.full((width,), factor, dtype=torch.float64, device=k.device)
    share = share.pow(torch.arange(width - 1, -1, -1, device=k.device)).float()
    for part, tile in window_tiles(window, total.shape[2]):
        weights = window_attention(tile, k, transform, past, valid)
        total += (share[part] @ weights).to(total.dtype)
    return total
