"""CAKE: more budget for layers whose attention is spread out and shifts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpolicy.allocators.attention import (
    ByAttention,
    before_window,
    bounds_in_proportion,
    divide_in_proportion,
    guarantee_in_proportion,
)
from kvpolicy.protocols import AttentionNeeds, Guarantee, HeadAllocator, LayerAttention, LayerBounds
from kvpolicy.text.strategy import least, strategy

LEAST_ENTROPY = 1e-6
"""The entropy is raised to this before its logarithm is taken: attention is fp32, which does not resolve less."""

LEAST_VARIANCE = 1e-12
"""The same for the variance."""

LEAST_TEMPERATURE = 1e-3
"""The least temperature."""

_ROUNDING = 1e-3
"""By how much the logarithm of a preference may exceed the largest one, since attention is fp32."""

_LARGEST_EXPONENT = 600.0
"""Of a weight in a sum of fp64."""


@strategy
class CAKE(ByAttention):
    """Give more budget to layers whose attention is spread out and shifts between queries.

    The preference of a layer is the entropy of the attention of the newest queries, to the power `1 / entropy`, times
    its variance over these queries, to the power `1 / variance`; both are summed over heads and the tokens before the
    queries. Budgets are in proportion to preferences. The metric is the logarithm of the preference.

    Args:
        entropy: Temperature of the entropy; the larger, the less it counts.
        variance: Temperature of the variance.
        window: The number of queries.
        heads: How the budget of a layer is divided among its KV heads; None for the same budget in every head.

    Examples:
        >>> import torch
        >>> preference = torch.tensor([[1.0, 3.0, 6.0]])
        >>> CAKE().budgets(preference.log(), torch.tensor([300]), 1, torch.tensor([1000]), 3).tolist()
        [[30, 90, 180]]

    Source:
        CAKE (arXiv:2503.12491), and its authors' code. Differences from the code:

        - the score by which CAKE ranks tokens, mean plus variance, is no part of the allocator;
        - the temperatures are 1; those that the authors tuned for a model are on the page of the method;
        - attention is fp32 and not rounded to the model's dtype before the variance;
        - entropy is at least 1e-6 and variance at least 1e-12, so that layers without any are alike;
        - budgets are divided once, after all layers, which gives those of the authors' cascade (while the prompt runs,
          layers drop what no division can give them);
        - prompts no longer than budget and window are compressed too;
        - every row has its own budgets; what a layer cannot use goes to the other layers in proportion (there, once);
          rounding preserves the total (there, it rounds down).
    """

    entropy: float = least(LEAST_TEMPERATURE, 1.0)
    variance: float = least(LEAST_TEMPERATURE, 1.0)
    window: int = least(1, 32)
    heads: HeadAllocator | None = None

    @property
    def attention(self) -> AttentionNeeds:
        """Entropy and variance over the newest queries."""
        return AttentionNeeds(("variance", "entropy"), self.window)

    def measure(self, seen: LayerAttention) -> Tensor:
        """The logarithm of the preference, [B] fp32."""
        before = before_window(seen.positions, seen.length, seen.queries)[:, None]
        preference = torch.zeros_like(seen.length, dtype=torch.float64)
        entropy = seen.entropy, self.entropy, LEAST_ENTROPY
        variance = seen.variance, self.variance, LEAST_VARIANCE
        for found, temperature, smallest in (entropy, variance):
            assert found is not None, "entropy and variance were requested"
            by_head = torch.where(before, found, 0).sum(-1, dtype=torch.float64)
            preference += seen.ranks.all_queries(by_head).sum(-1).clamp_min(smallest).log() / temperature
        return preference.float()

    def budgets(self, metrics: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        assert metrics is not None, "cake measures the attention of every layer"
        return divide_in_proportion(torch.softmax(metrics.double(), -1), total, floor, ceiling)

    def bounds(
        self, metrics: Tensor, total: Tensor, floor: int, ceiling: Tensor, layers: int, queries: int
    ) -> LayerBounds:
        metrics = metrics.double().to(total.device)
        highest = metrics.amax(-1)
        # The most that entropy and variance can be: of even attention over all tokens, and of queries that each attend
        # to one token of their own.
        entropy = (queries * self.window * ceiling.double().log()).clamp_min(LEAST_ENTROPY)
        variance = queries * self.window / max(self.window - 1, 1)
        largest = entropy.log() / self.entropy + math.log(variance) / self.variance + _ROUNDING
        heaviest = (largest - highest).clamp_max(_LARGEST_EXPONENT).exp()
        weights = (metrics - highest[:, None]).exp()
        return bounds_in_proportion(weights, 0.0, heaviest, total, floor, ceiling, layers)

    def guarantee(self, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Guarantee:
        return guarantee_in_proportion(total, floor, layers)
