"""Blocks of slots that a write starts, and the tokens that it puts into them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Blocks(NamedTuple):
    """The tokens of a write, grouped by block of slots.

    A write fills the blocks that it starts one after the other (see `Stage.write`), so there are at most F of them, as
    many as its tokens fill. It continues at most as many as it has tokens.

    Attributes:
        token: Index of the token that is written to each slot, [B, H, X, size] int64; -1 if none is.
        order: Indices of the blocks that the write starts, then of those that it continues, then of others,
            [B, H, min(n, X)] int64: none that it writes to is left out.
        is_new: Whether the write starts the first F blocks of `order`: it writes to them, and none of their slots is
            occupied, [B, H, F] bool.
    """

    token: Tensor
    order: Tensor
    is_new: Tensor

    @property
    def started(self) -> Tensor:
        """Indices of the blocks that the write starts where `is_new`, [B, H, F] int64."""
        return self.order[..., : self.is_new.shape[-1]]

    def tokens(self, which: Tensor) -> Tensor:
        """Index of the token that is written to each slot of the blocks `which` [B, H, m], [B, H, m, size]; or -1."""
        return self.token.gather(2, which[..., None].expand(-1, -1, -1, self.token.shape[-1]))

    def rows(self, slots: Tensor) -> Tensor:
        """For slots [B, H, n], where their block is in `started`; F if it is not."""
        batch, heads, count = self.started.shape
        blocks = self.token.shape[2]
        number = torch.arange(count, device=slots.device).expand_as(self.started)
        row = slots.new_full((batch, heads, blocks), count).scatter(2, self.started, number)
        return row.gather(2, slots.div(self.token.shape[-1], rounding_mode="floor"))

    def gather(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Group the tokens of the blocks that the write starts.

        Args:
            x: The tokens of the write, [B, H, n, D].

        Returns:
            The tokens of the blocks `started`, [B, H, F, size, D], zero in slots that are not written; and a mask of
            the slots that are, [B, H, F, size, 1].
        """
        size = self.token.shape[-1]
        token = self.tokens(self.started)
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
    order = rank.argsort(dim=-1, descending=True, stable=True)[..., : min(tokens, total // size)]
    return Blocks(token, order, is_new.gather(2, order[..., : -(-tokens // size)]))
