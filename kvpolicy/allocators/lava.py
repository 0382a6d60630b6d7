"""LAVa: more budget for layers whose scores are spread over more tokens and heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.allocators.attention import (
    ByAttention,
    before_window,
    bounds_in_proportion,
    check_odd,
    divide_in_proportion,
    guarantee_in_proportion,
)
from kvpolicy.protocols import AttentionNeeds, Guarantee, HeadAllocator, LayerAttention, LayerBounds
from kvpolicy.text.strategy import checked, least, strategy


@strategy
class LAVa(ByAttention):
    """Give more budget to layers whose scores are spread over more tokens and heads.

    The score of a token before the newest queries is its attention from them, pooled along the tokens, times the
    largest L1 norm of any value of the head. The metric of a layer is the entropy of the scores of all its heads and
    tokens.

    Args:
        window: The number of queries.
        kernel: Width of the maximum pooling along the tokens, odd.
        heads: How the budget of a layer is divided among its KV heads; None for the same budget in every head.

    Examples:
        >>> import torch
        >>> entropy = torch.tensor([[0.2, 0.5, 0.8]])
        >>> LAVa().budgets(entropy, torch.tensor([300]), 1, torch.tensor([1000]), 3).tolist()
        [[40, 100, 160]]

    Source:
        LAVa (arXiv:2509.09754), and its authors' code: its division among layers. Differences from the code:

        - inside a layer, heads are not divided by these scores; with `lava/adakv+snapkv`, they compete as in LAVa, by
          attention without the size of values;
        - the largest value of a head may be one of the window (there, of the tokens before it);
        - the total is fixed (there, a misspelt attribute leaves the safe part of a layer that of the average, so that
          small layers overspend);
        - budgets are divided once, after all layers, which gives those of the authors' division after each layer (while
          the prompt runs, layers drop what no division can give them);
        - every row has its own budgets; what a layer cannot use goes to the other layers in proportion; the total is
          exact.
    """

    window: int = least(1, 32)
    kernel: int = checked(check_odd, 7)
    heads: HeadAllocator | None = None

    @property
    def attention(self) -> AttentionNeeds:
        """The mean over the newest queries, and the size of values."""
        return AttentionNeeds(("mean", "value_size"), self.window)

    def measure(self, seen: LayerAttention) -> Tensor:
        """The entropy of the scores, [B] fp32, in [0, 1]: 1 if all scores are equal."""
        assert seen.mean is not None and seen.value_size is not None, "mean and size of values were requested"
        before = before_window(seen.positions, seen.length, seen.queries)[:, None]
        shown = torch.where(before, seen.mean, 0)
        pooled = F.max_pool1d(shown, self.kernel, stride=1, padding=self.kernel // 2)
        best = seen.ranks.largest(pooled.unflatten(1, (seen.kv_heads, -1)).amax(2))  # of the query heads of a KV head
        score = torch.where(before, best * seen.value_size[..., None], 0).double()
        sums = torch.stack([score.sum(-1), torch.xlogy(score, score).sum(-1)], -1)  # [B, H, 2]
        every = seen.ranks.all_heads(sums)
        mass, weighted = every.sum(1).unbind(-1)
        entropy = torch.where(mass > 0, mass.log() - weighted / mass, 0)
        most = (every.shape[1] * before.sum((1, 2))).clamp_min(2).double().log()
        return (entropy / most).clamp(0, 1).float()

    def budgets(self, metrics: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        assert metrics is not None, "lava measures the attention of every layer"
        return divide_in_proportion(metrics, total, floor, ceiling)

    def bounds(
        self, metrics: Tensor, total: Tensor, floor: int, ceiling: Tensor, layers: int, queries: int
    ) -> LayerBounds:
        return bounds_in_proportion(metrics, 0.0, 1.0, total, floor, ceiling, layers)

    def guarantee(self, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Guarantee:
        return guarantee_in_proportion(total, floor, layers)
