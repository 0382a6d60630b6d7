"""Blocks of slots that a write starts, and the tokens that it puts into them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Blocks(NamedTuple):
    """The tokens of a write, grouped by block of slots. A write starts at most as many blocks as it has tokens, F.

    Attributes:
        token: Index of the token that is written to each slot, [B, H, X, size] int64; -1 if none is.
        which: Indices of the blocks that the write starts, then of those that it continues, then of others,
            [B, H, F] int64: none that it writes to is left out.
        is_new: Whether the write starts these blocks: it writes to them, and none of their slots is occupied,
            [B, H, F] bool.
    """

    token: Tensor
    which: Tensor
    is_new: Tensor

    def tokens(self) -> Tensor:
        """Index of the token that is written to each slot of the blocks `which`, [B, H, F, size]; -1 if none is."""
        return self.token.gather(2, self.which[..., None].expand(-1, -1, -1, self.token.shape[-1]))

    def rows(self, slots: Tensor) -> Tensor:
        """For slots [B, H, n], where their block is in `which`; F if it is not."""
        batch, heads, count = self.which.shape
        blocks = self.token.shape[2]
        number = torch.arange(count, device=slots.device).expand_as(self.which)
        row = slots.new_full((batch, heads, blocks), count).scatter(2, self.which, number)
        return row.gather(2, slots.div(self.token.shape[-1], rounding_mode="floor"))

    def gather(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Group tokens by block.

        Args:
            x: The tokens of the write, [B, H, n, D].

        Returns:
            The tokens of the blocks `which`, [B, H, F, size, D], zero in slots that are not written; and a mask of the
            slots that are, [B, H, F, size, 1].
        """
        size = self.token.shape[-1]
        token = self.tokens()
        is_written = (token >= 0)[..., None]
        index = token.flatten(2).clamp(min=0)[..., None].expand(-1, -1, -1, x.shape[-1])
        grouped = x.gather(2, index).unflatten(2, (token.shape[2], size))
        return grouped.masked_fill(~is_written, 0), is_written


def blocks_of(slots: Tensor, write_mask: Tensor, occupied: Tensor, size: int) -> Blocks:
    """Find the blocks of `size` slots that a write starts; the other arguments are those of `Stage.write`."""
    tokens = slots.shape[2]
    total = occupied.shape[2]
    number = torch.arange(tokens, device=slots.device).expand_as(slots)
    # Shapes must not depend on the mask, so masked tokens are scattered to an extra slot at the end, then cut off.
    empty = slots.new_full((*slots.shape[:2], total + 1), -1)
    token = empty.scatter(2, torch.where(write_mask, slots, total), number)[..., :total]
    token = token.unflatten(2, (total // size, size))
    is_written = (token >= 0).any(-1)
    is_new = is_written & ~occupied.unflatten(2, (total // size, size)).any(-1)
    # New blocks first. The sort is stable, so they stay in the order of their slots.
    rank = is_written.int() + is_new.int()
    which = rank.argsort(dim=-1, descending=True, stable=True)[..., : min(tokens, total // size)]
    return Blocks(token, which, is_new.gather(2, which))
