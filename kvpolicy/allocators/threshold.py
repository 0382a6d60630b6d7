"""One threshold for the scores of all layers and heads."""

from __future__ import annotations

from torch import Tensor

from kvpolicy.allocators.curves import cut_curves
from kvpolicy.protocols import Allocator, AttentionNeeds, HeadAllocator, LayerAttention, LayerMetric
from kvpolicy.text.strategy import strategy


@strategy
class GlobalThreshold(Allocator):
    """Give each layer as much as it has of the best tokens of all layers and heads.

    The tokens of all heads of all layers are ranked together. Those above one threshold, of which there are as many as
    the budget allows, determine the budget of each layer, and with `adakv` behind it that of each head.

    Args:
        heads: How the budget of a layer is divided among its KV heads; None for the same budget in every head.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("global/adakv:safeguard=0.0+kvzip@0.2"))
        'global/adakv:safeguard=0.0+kvzip@0.2'

    Source:
        The budgets of KVzip (arXiv:2505.23416), with `adakv:safeguard=0.0` and `kvzip`, and of Layer-DefensiveKV
        (arXiv:2510.13334), with `adakv` and `defensive`. Differences:

        - budgets of layers are whole tokens per head, those of heads whole pages (there, every head is cut at the
          threshold);
        - every layer has at least the selector's minimum;
        - tokens that the selector always keeps come first;
        - scores are compared with a row's first prompt, by equal budgets, before the selector chooses; later prompts
          keep its shares.
    """

    heads: HeadAllocator | None = None

    @property
    def layer_metric(self) -> LayerMetric:
        """Curves of the tokens of all heads."""
        return "curve"

    @property
    def attention(self) -> AttentionNeeds:
        """The worth of each token."""
        return AttentionNeeds(("worth",))

    def measure(self, seen: LayerAttention) -> Tensor:
        """The worth of a further token per head, [B, N]: the middle one of the next tokens of all heads together."""
        assert seen.worth is not None, "global requests the worth of each token"
        heads = seen.worth.shape[1]
        ranked = seen.worth.flatten(1).sort(dim=-1, descending=True).values
        return ranked[:, (heads - 1) // 2 :: heads]

    def budgets(self, metrics: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        assert metrics is not None, "global requests the curve of every layer"
        return cut_curves(metrics, total, floor, ceiling)
