"""PyramidKV: a larger budget for early layers."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.protocols import Allocator, HeadAllocator
from kvpolicy.text.budget import waterfill
from kvpolicy.text.strategy import finite, strategy


@strategy
class Pyramid(Allocator):
    """Give early layers more budget than late ones, decreasing linearly.

    Attention is spread over many tokens in the first layers and concentrates on few tokens in the last ones, which
    therefore need fewer. The last layer gets the average budget divided by `beta`, and the first layer as much as keeps
    the average.

    Args:
        beta: The ratio of the average budget to that of the last layer, at least 1 (1 is uniform).
        heads: How the budget of a layer is divided among its KV heads; None for the same budget in every head.

    Examples:
        >>> Pyramid(beta=2).budgets(None, torch.tensor([40]), 1, torch.tensor([100]), 4).tolist()
        [[15, 12, 8, 5]]

    Source:
        PyramidKV (arXiv:2406.02069), Section 3. Differences from the authors' code:

        - the slope is a fraction, not rounded down (which exceeds the budget of L layers by up to (L - 1) / 2 tokens a
          layer);
        - the observation window is divided like the rest (there, every layer keeps it, and the pyramid divides what is
          left of the budget);
        - what a layer cannot use goes to the other layers in proportion (there, both ends of the line move), and the
          total is exact;
        - there is no fallback to uniform budgets for prompts below about twice the budget;
        - the selector is a part of its own; that of the paper is `snapkv`.
    """

    beta: float = finite(1, 20.0)
    heads: HeadAllocator | None = None

    def budgets(self, metrics: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        average = total.double()[:, None] / layers
        last = average / self.beta
        first = 2 * average - last
        # Depth from 0 to 1; a single layer is in the middle, so that it gets the average.
        depth = torch.linspace(0, 1, layers, dtype=torch.float64, device=total.device) if layers > 1 else 0.5
        return waterfill(first - depth * (first - last), total, floor, ceiling)
