"""SimLayerKV: lazy layers, which attend to the first and the newest tokens, keep only those."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.allocators.attention import ByAttention, divide_in_proportion
from kvpolicy.protocols import AttentionNeeds, Guarantee, HeadAllocator, LayerAttention, LayerBounds
from kvpolicy.text.strategy import fraction, least, strategy


@strategy
class SimLayerKV(ByAttention):
    """Let lazy layers keep the first and the newest tokens, and divide the rest among the others.

    The metric of a layer is the attention of the last query of the prompt to the first and the newest tokens, as a mean
    over the heads. Above a threshold, the layer is lazy.

    Args:
        sinks: The number of first tokens, at least 0.
        recent: The number of newest tokens, the last query's own included.
        threshold: The attention above which a layer is lazy, in (0, 1].
        heads: How the budget of a layer is divided among its KV heads; None for the same budget in every head.

    Examples:
        >>> import torch
        >>> share = torch.tensor([[0.5, 0.95, 0.7]])  # of the attention, on these tokens
        >>> SimLayerKV(recent=16).budgets(share, torch.tensor([300]), 1, torch.tensor([1000]), 3).tolist()
        [[140, 20, 140]]

    Source:
        SimLayerKV (arXiv:2410.13846), its authors' code, and kvpress (SimLayerKVPress). Differences:

        - the total is fixed: what lazy layers do not need is divided equally among the others, which do not keep the
          whole prompt;
        - a lazy layer gets at most an even share;
        - a layer is judged at the last query of the prompt, as in kvpress (the authors: at the first generated token);
        - which tokens a lazy layer keeps is up to the selector, such as `streaming`;
        - the default threshold is that of Llama-3 for every model;
        - every row has its own budgets; what a layer cannot use goes to the other layers in proportion; the total is
          exact.
    """

    sinks: int = least(0, 4)
    recent: int = least(1, 1024)
    threshold: float = fraction(0.9)
    heads: HeadAllocator | None = None

    @property
    def attention(self) -> AttentionNeeds:
        """The attention of the last query."""
        return AttentionNeeds(("mean",), 1)

    def measure(self, seen: LayerAttention) -> Tensor:
        """Attention to the first and the newest tokens, [B] fp32, as a mean over the query heads."""
        assert seen.mean is not None, "the mean was requested"
        positions = seen.positions
        length = seen.length[:, None]
        near = (positions >= 0) & ((positions < self.sinks) | (positions >= length - self.recent))
        by_head = torch.where(near[:, None], seen.mean, 0).sum(-1, dtype=torch.float64)
        return seen.ranks.all_queries(by_head).mean(-1).float()

    def budgets(self, metrics: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        assert metrics is not None, "simlayer measures the attention of every layer"
        is_lazy = metrics.to(total.device) > self.threshold
        even = total.double()[:, None] / layers
        lazy = even.clamp_max(self.sinks + self.recent)
        count = is_lazy.sum(-1, keepdim=True)
        rest = (total[:, None] - count * lazy) / (layers - count).clamp_min(1)
        # All layers are lazy: an even division.
        lazy = torch.where(count < layers, lazy, even)
        return divide_in_proportion(torch.where(is_lazy, lazy, rest), total, floor, ceiling)

    def bounds(
        self, metrics: Tensor, total: Tensor, floor: int, ceiling: Tensor, layers: int, queries: int
    ) -> LayerBounds:
        batch, measured = metrics.shape

        def divided(other: float) -> Tensor:
            every = torch.cat([metrics, metrics.new_full((batch, layers - measured), other)], -1)
            return self.budgets(every, total, floor, ceiling, layers)[:, :measured]

        # With more layers that are not lazy, each of them gets less; and so do the others, whom they leave less.
        few = divided(torch.inf)
        many = divided(0.0)
        even = (total // layers)[:, None]
        least = (few.minimum(many).minimum(even) - 1).clamp_min(floor)
        return LayerBounds(least, few.maximum(many).maximum(even) + 1)

    def guarantee(self, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Guarantee:
        even = total // layers
        return Guarantee((even.clamp_max(self.sinks + self.recent) - 1).clamp_min(floor), 2 * (total + layers))
