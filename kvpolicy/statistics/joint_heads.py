"""Query heads of several layers that read the same keys, as those of one layer with larger groups."""

from __future__ import annotations

import torch
from torch import Tensor


def together(first: Tensor, second: Tensor, heads: int) -> Tensor:
    """Numbers of query heads [B, Hq, ...] and of others [B, Hq', ...] by KV head, [B, Hq + Hq', ...].

    Each of the `heads` KV heads has its query heads of the first layer, and behind them those of the second.
    """
    groups = (t.unflatten(1, (heads, -1)) for t in (first, second))
    return torch.cat(tuple(groups), 2).flatten(1, 2)
