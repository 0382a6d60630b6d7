"""The interface of an allocator: how many tokens each layer may keep."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Allocator(Protocol):
    """How many tokens may each layer keep?"""

    @property
    def layer_metric(self) -> Literal["", "cosine"]:
        """The metric that must be measured in every layer before budgets are known: none, or the attention cosine."""
        ...

    def budgets(self, metrics: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        """Divide a row's tokens among the layers.

        Args:
            metrics: The values of `layer_metric`, [B, L] fp32, or None.
            total: Tokens of all layers together, [B] int64. The rows of the result sum to it.
            floor: The fewest tokens that any layer may get.
            ceiling: The most tokens that any layer of a row can use, [B] int64.
            layers: L.

        Returns:
            Tokens per layer and row, [B, L] int64.
        """
        ...
