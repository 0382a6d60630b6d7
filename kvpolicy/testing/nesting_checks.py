"""Allocators for a check: one that lets layers drop tokens while a prompt runs, and one that lets them wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpolicy.protocols import Allocator, AttentionNeeds, Guarantee, LayerAttention, LayerBounds, LayerMetric
from kvpolicy.text.budget import waterfill


@dataclass(frozen=True, kw_only=True, slots=True)
class FallingBudgets(Allocator):
    """Half as many tokens again for each earlier layer, after every layer was measured."""

    layer_metric: ClassVar[LayerMetric] = "attention"  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    def attention(self) -> AttentionNeeds:
        """None."""
        return AttentionNeeds()

    def measure(self, seen: LayerAttention) -> Tensor:
        """The same for every layer."""
        return torch.ones(len(seen.length))

    def budgets(self, metrics: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        """Tokens per layer and row, [B, L] int64."""
        shares = 1.5 ** -torch.arange(layers, dtype=torch.float64)
        return waterfill(total[:, None] * shares / shares.sum(), total, floor, ceiling)


@dataclass(frozen=True, kw_only=True, slots=True)
class FallingBounds(FallingBudgets):
    """The same with bounds, so that layers drop tokens under a larger budget than they are given."""

    def bounds(
        self, metrics: Tensor, total: Tensor, floor: int, ceiling: Tensor, layers: int, queries: int
    ) -> LayerBounds:
        """The budgets of the layers, and twice as much."""
        known = self.budgets(None, total, floor, ceiling, layers)[:, : metrics.shape[1]]
        return LayerBounds(known, 2 * known)

    def guarantee(self, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Guarantee:
        """The last layer has the fewest tokens."""
        return Guarantee(self.budgets(None, total, floor, ceiling, layers)[:, -1], 2 * total)
