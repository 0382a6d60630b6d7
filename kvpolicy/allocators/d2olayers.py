"""D2O's division among layers: more budget for layers whose heads spread their attention alike."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpolicy.allocators.attention import (
    ByAttention,
    bounds_in_proportion,
    divide_in_proportion,
    guarantee_in_proportion,
)
from kvpolicy.protocols import AttentionNeeds, Guarantee, HeadAllocator, LayerAttention, LayerBounds
from kvpolicy.text.strategy import strategy

EPSILON = 1e-6
"""Added to the difference of the largest and the smallest variance of a layer, as in the authors' code."""

LIGHTEST = math.exp(-1)
"""The weight of a layer with the metric 1, the largest one."""


@strategy
class D2OLayers(ByAttention):
    """Give more budget to layers in which few heads concentrate their attention.

    Of each head, the attention is summed over all queries, and the variance of these sums over the tokens says how much
    it is concentrated. The variances of the heads of a layer are scaled to [0, 1]; their mean is the metric of the
    layer. Budgets are in proportion to exp of its negative.

    Args:
        heads: How the budget of a layer is divided among its KV heads; None for the same budget in every head.

    Examples:
        >>> import torch
        >>> metric = torch.tensor([[0.0, 0.5, 1.0]])
        >>> D2OLayers().budgets(metric, torch.tensor([300]), 1, torch.tensor([1000]), 3).tolist()
        [[152, 92, 56]]

    Source:
        D2O (arXiv:2406.13035), as its authors' code computes it: there too, variances are scaled among the heads of one
        layer. The merger `d2o` is the method's other part. Differences from the code:

        - every row has its own budgets, of its own tokens (there, variances are means over the batch);
        - the first two layers and the last are compressed like the others (there, they keep all tokens, beyond the
          budget);
        - a share has no minimum of 1 % and no maximum but the length of the prompt;
        - what a layer cannot use goes to the other layers in proportion, and the total is exact;
        - budgets are in effect after the prompt, not after the first generated token.
    """

    heads: HeadAllocator | None = None

    @property
    def attention(self) -> AttentionNeeds:
        """The sum over all queries."""
        return AttentionNeeds(("total",))

    def measure(self, seen: LayerAttention) -> Tensor:
        """The mean of the scaled variances of the heads, [B] fp32."""
        assert seen.total is not None, "the sum was requested"
        is_token = (seen.positions >= 0)[:, None]
        count = seen.length[:, None]
        sums = torch.where(is_token, seen.total, 0).double()
        mean = sums.sum(-1, keepdim=True) / count.clamp_min(1)[..., None]
        spread = torch.where(is_token, sums - mean, 0).square_().sum(-1)
        variance = seen.ranks.all_queries(spread / (count - 1).clamp_min(1))
        low, high = variance.aminmax(dim=-1, keepdim=True)
        return ((variance - low) / (high - low + EPSILON)).mean(-1).float()

    def budgets(self, metrics: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        assert metrics is not None, "d2olayers measures the attention of every layer"
        return divide_in_proportion(torch.softmax(-metrics.double(), -1), total, floor, ceiling)

    def bounds(
        self, metrics: Tensor, total: Tensor, floor: int, ceiling: Tensor, layers: int, queries: int
    ) -> LayerBounds:
        lightest = torch.tensor(LIGHTEST, dtype=torch.float32, device="cpu")
        weights = (-metrics.double()).exp()
        return bounds_in_proportion(weights, lightest, 1.0, total, floor, ceiling, layers)

    def guarantee(self, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Guarantee:
        return guarantee_in_proportion(total, floor, layers, LIGHTEST / (LIGHTEST + layers - 1))
