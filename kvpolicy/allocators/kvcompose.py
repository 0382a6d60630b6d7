"""KVCompose: compare layers by the composite of their heads' best tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.allocators.curves import cut_curves
from kvpolicy.protocols import Allocator, AttentionNeeds, HeadAllocator, LayerAttention, LayerMetric
from kvpolicy.text.strategy import strategy


@strategy
class KVCompose(Allocator):
    """Give more budget to layers whose heads have more tokens that are worth keeping.

    A composite token of a layer is one token of each head: the best ones together, then the second best, and so on. It
    is worth the mean of their scores. The composite tokens of all layers compete. So heads of a layer keep equally many
    tokens, each its own.

    Args:
        heads: How the budget of a layer is divided among its KV heads; None for the same budget in every head.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("kvcompose+kvzip@0.2"))
        'kvcompose+kvzip@0.2'

    Source:
        KVCompose (arXiv:2509.05165), and kvpress (KVComposePress). Differences:

        - it is an allocator, and scores are those of the selector: with `kvzip`, the largest attention of a replay in
          any query head of a KV head (there, the context is replayed in one piece, and scores are means over the query
          heads, to which the mean over all KV heads is added);
        - tokens that the selector always keeps come first in every layer;
        - every layer has at least the selector's minimum;
        - curves are drawn with a row's first prompt, by equal budgets, before the selector chooses; later prompts keep
          its shares.
    """

    heads: HeadAllocator | None = None

    @property
    def layer_metric(self) -> LayerMetric:
        """Curves of composite tokens."""
        return "curve"

    @property
    def attention(self) -> AttentionNeeds:
        """The worth of each token."""
        return AttentionNeeds(("worth",))

    def measure(self, seen: LayerAttention) -> Tensor:
        """The worth of composite tokens, [B, N]: the mean over the heads."""
        assert seen.worth is not None, "kvcompose requests the worth of each token"
        ranked = seen.worth.sort(dim=-1, descending=True).values
        return ranked.double().mean(1).float()

    def budgets(self, metrics: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        assert metrics is not None, "kvcompose requests the curve of every layer"
        if metrics.dim() == 3:  # curves, and not the shares of an earlier division
            metrics = torch.cat([metrics.amax(1, keepdim=True), metrics[:, 1:]], 1)
        return cut_curves(metrics, total, floor, ceiling)
