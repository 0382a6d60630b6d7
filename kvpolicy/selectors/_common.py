"""Helpers shared by selectors: means over the query heads of a KV head, priorities by position, tokens always kept."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.protocols import View


def group_mean(statistic: Tensor, view: View) -> Tensor:
    """Mean over the query heads of each KV head: [B, Hq, N] -> [B, H, N]."""
    return view.ranks.group_mean(statistic.unflatten(1, (view.positions.shape[1], -1)))


def keep_always(priority: Tensor, protected: Tensor) -> Tensor:
    """`priority` [B, H, N], replaced by inf for the tokens in `protected`."""
    return priority.masked_fill(protected, torch.inf)


def by_position(positions: Tensor) -> Tensor:
    """Higher priority for later tokens; exact in fp32 up to position 16,777,216."""
    return positions.float()
