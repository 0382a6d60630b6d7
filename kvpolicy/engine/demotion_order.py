"""Which tokens leave the full-precision buffer, or a stage, first."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.row_limits import RowLimits, block_of, is_pinned, residual_of
from kvpolicy.engine.selection import finite_priority
from kvpolicy.protocols import Ranks, Selector, State, Traits, View


class DemotionOrder(NamedTuple):
    """Criteria for the order of demotion in a layer.

    Attributes:
        selector: Ranks tokens where `Traits.demote_by` is `priority`.
        traits: The traits of the codec.
        limits: The limits of the rows.
        length: Tokens that each row has seen, [B].
        budget: The most tokens of each row, [B].
        layer_idx: Index of the layer.
        ranks: The ranks that hold the layer's other heads.
    """

    selector: Selector
    traits: Traits
    limits: RowLimits
    length: Tensor
    budget: Tensor
    layer_idx: int
    ranks: Ranks

    def indices(self, positions: Tensor, state: State, candidates: Tensor) -> Tensor:
        """The index of each token, first to leave first, [B, H, n].

        Tokens that are never demoted come after all others, and tokens that are no candidates last.

        Args:
            positions: [B, H, n] int32.
            state: The selector's state of the tokens.
            candidates: Which tokens are candidates, [B, H, n] bool.
        """
        if self.traits.demote_by == "age":
            order = positions.argsort(dim=-1, stable=True)
        else:
            # Ties leave from the later position, as in eviction: sort by falling position first, then stably.
            order = positions.argsort(dim=-1, descending=True, stable=True)
            seen = positions.masked_fill(~candidates, -1)
            view = View(seen, self.length, self._precise_tokens(), self.layer_idx, self.ranks)
            priority = finite_priority(self.selector.priority(state, view))
            order = order.gather(-1, priority.gather(-1, order).argsort(dim=-1, stable=True))
        # Sorted stably by class, so that the order within each class stays.
        last = torch.where(candidates, 0, 2).masked_fill(candidates & self._never_demoted(positions), 1)
        return order.gather(-1, last.gather(-1, order).argsort(dim=-1, stable=True))

    def _precise_tokens(self) -> Tensor:
        """Tokens of each row that stay precise, [B]: the budget that the selector ranks for."""
        precise = (self.limits.flush_threshold - block_of(self.limits, self.traits))[:, 0]
        if self.limits.stage_capacity.shape[1] > 1:  # the first of several stages is the more precise one
            precise = precise + self.limits.stage_capacity[:, 0]
        return torch.minimum(precise.clamp_min(self.selector.min_tokens), self.budget)

    def _never_demoted(self, positions: Tensor) -> Tensor:
        """Pinned tokens and, where the priority decides, the newest."""
        stays = torch.zeros_like(positions, dtype=torch.bool)
        if self.traits.pinned:
            stays = is_pinned(self.limits, positions)
        if self.traits.demote_by == "priority":
            newest = self.length[:, None] - residual_of(self.limits, self.traits)
            stays = stays | (positions >= newest[..., None])
        return stays
