"""Helpers shared by allocators that cut the curves of all layers at one height."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.text.budget import waterfill


def cut_curves(curves: Tensor, total: Tensor, floor: int, ceiling: Tensor) -> Tensor:
    """Tokens of each layer if the best tokens of all layers together are kept, [B, L] int64.

    Args:
        curves: What each further token per head is worth, [B, L, N] in falling order, -inf for none; or a number of
            each layer [B, L], to which budgets are proportional.
        total: Tokens of all layers together, [B] int64.
        floor: The fewest tokens of a layer.
        ceiling: The most tokens that a layer of each row can use, [B] int64.
    """
    if curves.dim() == 2:
        wished = curves.double()
    else:
        # Stable: of equal tokens those of the earlier layer win.
        order = curves.flatten(1).argsort(dim=-1, descending=True, stable=True).to(total.device)
        place = torch.arange(order.shape[-1], device=order.device)
        wins = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order, place < total[:, None])
        exist = (curves > -torch.inf).to(total.device)
        wished = (wins.unflatten(1, curves.shape[1:]) & exist).sum(-1).double()
    wished = wished.to(total.device)
    wished = torch.where(wished.sum(-1, keepdim=True) > 0, wished, 1)  # rows without a token
    target = wished / wished.sum(-1, keepdim=True) * total[:, None]
    return waterfill(target, total, floor, ceiling)
