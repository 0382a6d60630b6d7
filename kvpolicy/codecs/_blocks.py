"""The blocks of slots that a write begins, and the tokens it brings them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Blocks(NamedTuple):
    """Where a write's tokens go, seen from the slots; there are at most as many new blocks as tokens.

    Attributes:
        token: Which token goes to each slot, by block, [B, H, X, size] int64; -1 where none does.
        which: The blocks that the write begins, then others, [B, H, F] int64.
        fresh: Whether the write begins them: it brings them tokens, and none lives there, [B, H, F] bool.
    """

    token: Tensor
    which: Tensor
    fresh: Tensor

    def bring(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, H, n, D] by block [B, H, F, size, D], zero where there is none, and where there is one."""
        size = self.token.shape[-1]
        token = self.token.gather(2, self.which[..., None].expand(-1, -1, -1, size))
        there = (token >= 0)[..., None]
        wide = token.flatten(2).clamp(min=0)[..., None].expand(-1, -1, -1, x.shape[-1])
        some = x.gather(2, wide).unflatten(2, (token.shape[2], size))
        return some.masked_fill(~there, 0), there


def blocks_of(slots: Tensor, write_mask: Tensor, occupied: Tensor, size: int) -> Blocks:
    """Find the blocks of `size` slots that a write begins; see `Stage.write` for the arguments."""
    tokens, total = slots.shape[2], occupied.shape[2]
    number = torch.arange(tokens, device=slots.device).expand_as(slots)
    nowhere = slots.new_full((*slots.shape[:2], total + 1), -1)  # the last place takes what is not write_mask
    token = nowhere.scatter(2, torch.where(write_mask, slots, total), number)[..., :total]
    token = token.unflatten(2, (total // size, size))
    fresh = (token >= 0).any(-1) & ~occupied.unflatten(2, (total // size, size)).any(-1)
    which = fresh.int().argsort(dim=-1, descending=True, stable=True)[..., : min(tokens, total // size)]
    return Blocks(token, which, fresh.gather(2, which))
