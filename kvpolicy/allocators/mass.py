"""AttentionMass: budgets by the tokens that reach a share of a layer's attention."""

from __future__ import annotations

from torch import Tensor

from kvpolicy.allocators.attention import (
    ByAttention,
    bounds_in_proportion,
    divide_in_proportion,
    guarantee_in_proportion,
    number_reaching,
)
from kvpolicy.protocols import AttentionNeeds, Guarantee, HeadAllocator, LayerAttention, LayerBounds
from kvpolicy.text.strategy import fraction, strategy


@strategy
class AttentionMass(ByAttention):
    """Give more budget to layers that need more tokens to reach a share of their attention.

    The attention is summed over all queries of the prompt and all heads of the layer. The metric is how many of the
    tokens with the largest sums reach the share; budgets are in proportion to it.

    Args:
        share: The share of the attention that must be reached, in (0, 1].
        heads: How the budget of a layer is divided among its KV heads; None for the same budget in every head.

    Examples:
        >>> import torch
        >>> tokens = torch.tensor([[10.0, 30.0, 60.0]])  # that are needed in each layer
        >>> AttentionMass().budgets(tokens, torch.tensor([300]), 1, torch.tensor([1000]), 3).tolist()
        [[30, 90, 180]]

    Source:
        ZipVL (arXiv:2410.08584), its number of important tokens; no code of its authors is public. Differences:

        - the number is no budget by itself but a share of one, so that the total is fixed (there, so many tokens of a
          layer keep full precision and take part in attention);
        - sums are of all queries, not of probes, and not divided by how many queries see a token;
        - attention in the prompt is not restricted to the important tokens;
        - a share counts as reached if no more than a millionth of it lacks;
        - every row has its own budgets; what a layer cannot use goes to the other layers in proportion; the total is
          exact.
    """

    share: float = fraction(0.975)
    heads: HeadAllocator | None = None

    @property
    def attention(self) -> AttentionNeeds:
        """The sum over all queries."""
        return AttentionNeeds(("total",))

    def measure(self, seen: LayerAttention) -> Tensor:
        """Tokens that are needed to reach the share, [B] fp32."""
        assert seen.total is not None, "the sum was requested"
        return number_reaching(seen.ranks.head_mean(seen.total), self.share).float()

    def budgets(self, metrics: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        assert metrics is not None, "mass measures the attention of every layer"
        return divide_in_proportion(metrics, total, floor, ceiling)

    def bounds(
        self, metrics: Tensor, total: Tensor, floor: int, ceiling: Tensor, layers: int, queries: int
    ) -> LayerBounds:
        return bounds_in_proportion(metrics, 1.0, ceiling, total, floor, ceiling, layers)

    def guarantee(self, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Guarantee:
        return guarantee_in_proportion(total, floor, layers)
