"""Uniform: the same budget for every layer."""

from __future__ import annotations

from torch import Tensor

from kvpolicy.protocols import Allocator, HeadAllocator
from kvpolicy.text.budget import waterfill
from kvpolicy.text.strategy import strategy


@strategy
class Uniform(Allocator):
    """Give every layer the same budget.

    If the total is not divisible by the number of layers, the first layers keep one token more.

    Args:
        heads: How the budget of a layer is divided among its KV heads; None for the same budget in every head.

    Examples:
        >>> import torch
        >>> Uniform().budgets(None, torch.tensor([10]), 1, torch.tensor([100]), 4).tolist()
        [[3, 3, 2, 2]]
    """

    heads: HeadAllocator | None = None

    def budgets(self, metrics: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        even = total.double() / layers
        return waterfill(even[:, None].expand(-1, layers), total, floor, ceiling)
