"""Tokens in full precision that must find a slot."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.state import map_state
from kvpolicy.protocols import State

BEYOND = torch.iinfo(torch.int32).max
"""Later than any position, and more than any count of tokens."""


class SlotData(NamedTuple):
    """What is written to slots: keys, values [B, H, n, D], positions [B, H, n] int32 and the selector's state."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    state: State


class TokenBatch(NamedTuple):
    """Tokens of each head, with their positions and the selector's state.

    Attributes:
        keys: [B, H, n, D].
        values: [B, H, n, D].
        positions: [B, H, n] int32.
        state: The selector's state, tensors of [B, H, n].
        chosen: Which tokens are kept, [B, H, n] bool; the others are ignored.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    state: State
    chosen: Tensor

    @property
    def data(self) -> SlotData:
        """The tokens without the choice."""
        return SlotData(self.keys, self.values, self.positions, self.state)

    def take(self, index: Tensor) -> TokenBatch:
        """Tokens `index` [B, H, m] of each head."""
        rows = torch.arange(index.shape[0], device=index.device)
        heads = torch.arange(index.shape[1], device=index.device)
        # Indexing copies whole vectors, which is twice as fast as gathering single numbers.
        vectors = rows[:, None, None], heads[:, None], index
        return TokenBatch(
            self.keys[vectors],
            self.values[vectors],
            self.positions.gather(-1, index),
            map_state(lambda t: t.gather(-1, index), self.state),
            self.chosen.gather(-1, index),
        )

    def window(self, start: int, size: int) -> TokenBatch:
        """Tokens `start` to `start + size` of each head; the last one is repeated where there are fewer."""
        index = torch.arange(start, start + size, device=self.positions.device)
        index = index.expand(*self.positions.shape[:2], -1).clamp_max(self.positions.shape[-1] - 1)
        return self.take(index)

    def by_position(self) -> Tensor:
        """The index of each token by ascending position, [B, H, n]; tokens that are not chosen come last."""
        return torch.where(self.chosen, self.positions, BEYOND).argsort(dim=-1, stable=True)

    def trimmed(self) -> TokenBatch:
        """The same by ascending position, cut to the largest number of chosen tokens of any head."""
        most = max(int(self.chosen.sum(-1).max()), 1)
        return self.take(self.by_position()[..., :most])

    def front(self, width: int) -> TokenBatch:
        """The chosen tokens first, in their order, cut to `width`, which must be enough for them."""
        index = (~self.chosen).int().argsort(dim=-1, stable=True)[..., :width]
        return self.take(index)
