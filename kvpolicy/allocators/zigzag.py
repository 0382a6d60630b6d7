"""ZigZagKV: more budget for layers whose attention is spread over more tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.allocators.attention import (
    ByAttention,
    bounds_in_proportion,
    divide_in_proportion,
    guarantee_in_proportion,
    number_reaching,
)
from kvpolicy.protocols import AttentionNeeds, Guarantee, HeadAllocator, LayerAttention, LayerBounds
from kvpolicy.text.strategy import fraction, least, strategy, where


@strategy
class ZigZagKV(ByAttention):
    """Give more budget to layers whose attention needs more tokens.

    The metric of a layer is the number of tokens that its heads need to reach a share of their attention, which the
    newest queries of the prompt have on average. Every layer has a part of an even division, and the rest is divided in
    proportion to the metric.

    Args:
        mass: The share of the attention that must be reached, in (0, 1].
        bound: The fraction of an even division that every layer has, in [0, 1].
        window: The number of queries.
        heads: How the budget of a layer is divided among its KV heads; None for the same budget in every head.

    Examples:
        >>> import torch
        >>> tokens = torch.tensor([[10.0, 30.0, 60.0]])  # that are needed in each layer
        >>> ZigZagKV().budgets(tokens, torch.tensor([300]), 1, torch.tensor([1000]), 3).tolist()
        [[44, 92, 164]]

    Source:
        ZigZagKV (arXiv:2412.09036). No code of its authors is public; `mass` and `bound` are those of a port to kvpress
        (pull request 238), and were not compared with the paper's. Differences from the port:

        - the number of tokens is a mean over query heads, of attention that is not pooled (there, of the scores of the
          inner press, which are those of KV heads);
        - a share counts as reached if no more than a millionth of it lacks;
        - every row has its own budgets (there, a batch is measured as a whole); what a layer cannot use goes to the
          other layers in proportion (there, it is lost); rounding preserves the total.
    """

    mass: float = fraction(0.9)
    bound: float = where(lambda bound: 0 <= bound <= 1, "at least 0 and at most 1", 0.2)
    window: int = least(1, 32)
    heads: HeadAllocator | None = None

    @property
    def attention(self) -> AttentionNeeds:
        """The mean over the newest queries."""
        return AttentionNeeds(("mean",), self.window)

    def measure(self, seen: LayerAttention) -> Tensor:
        """Tokens that are needed to reach the share, [B] fp32, as a mean over the query heads."""
        assert seen.mean is not None, "the mean was requested"
        needed = number_reaching(seen.mean, self.mass)
        return seen.ranks.all_queries(needed.double()).mean(-1, dtype=torch.float64).float()

    def budgets(self, metrics: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        assert metrics is not None, "zigzag measures the attention of every layer"
        return divide_in_proportion(metrics, total, floor, ceiling, self.bound)

    def bounds(
        self, metrics: Tensor, total: Tensor, floor: int, ceiling: Tensor, layers: int, queries: int
    ) -> LayerBounds:
        return bounds_in_proportion(metrics, 1.0, ceiling, total, floor, ceiling, layers, self.bound)

    def guarantee(self, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Guarantee:
        return guarantee_in_proportion(total, floor, layers, self.bound / layers)
