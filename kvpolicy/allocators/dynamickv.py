"""DynamicKV: layers compete with their best tokens for the budget."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.allocators.attention import ByAttention, before_window, check_odd, divide_in_proportion
from kvpolicy.protocols import AttentionNeeds, HeadAllocator, LayerAttention
from kvpolicy.text.strategy import checked, least, strategy


@strategy
class DynamicKV(ByAttention):
    """Give each layer as much as it has of the most attended tokens of all layers.

    Attention is summed over the newest queries and pooled along the tokens. The tokens of all heads of all layers are
    ranked together, and budgets are in proportion to how many of the best each layer has, of which there are as many as
    the budget allows. Unlike `global`, it does not need the scores of the selector.

    Args:
        window: The number of queries.
        kernel: Width of the average pooling along the tokens, odd.
        heads: How the budget of a layer is divided among its KV heads; None for the same budget in every head.

    Examples:
        >>> import torch
        >>> sums = torch.tensor([[[[0.9, 0.8, 0.7]], [[0.6, 0.1, 0.1]]]])  # of three tokens, one head, two layers
        >>> DynamicKV().budgets(sums, torch.tensor([4]), 1, torch.tensor([3]), 2).tolist()
        [[3, 1]]

    Source:
        DynamicKV (arXiv:2412.14838), and its authors' code. Differences from the code:

        - layers are compared once, when all have run (there, after every fourth, and layers beyond the last multiple of
          four stay whole);
        - a first cut at ten times the budget, which does not change which are best, is left out;
        - sums are means over the query heads of a KV head, and KV heads are not repeated;
        - every layer has at least the selector's minimum (there, one may end with the window alone);
        - a later prompt has the shares of the first;
        - every row has its own budgets; what a layer cannot use goes to the other layers in proportion; the total is
          exact, and no remainder goes to the last layer.
    """

    window: int = least(1, 8)
    kernel: int = checked(check_odd, 7)
    heads: HeadAllocator | None = None

    @property
    def attention(self) -> AttentionNeeds:
        """The mean over the newest queries, which ranks tokens as the sum does."""
        return AttentionNeeds(("mean",), self.window)

    def measure(self, seen: LayerAttention) -> Tensor:
        """The pooled attention of each token before the queries, [B, H, N] fp32; -inf for others."""
        assert seen.mean is not None, "the mean was requested"
        before = before_window(seen.positions, seen.length, seen.queries)[:, None]
        shown = torch.where(before, seen.mean, 0)
        pooled = F.avg_pool1d(shown, self.kernel, stride=1, padding=self.kernel // 2)
        by_head = seen.ranks.group_mean(pooled.unflatten(1, (seen.kv_heads, -1)))
        return seen.ranks.all_heads(by_head.masked_fill(~before, -torch.inf))

    def budgets(self, metrics: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        assert metrics is not None, "dynamickv measures the attention of every layer"
        return divide_in_proportion(best_tokens(metrics, total), total, floor, ceiling)


def best_tokens(metrics: Tensor, total: Tensor) -> Tensor:
    """How many of the best tokens of all layers each layer has, [B, L] fp64; of equal ones, those of earlier layers.

    Args:
        metrics: What each token of each head is worth, [B, L, H, N], -inf for none; or numbers of each layer, [B, L].
        total: Tokens of a head in all layers together, [B] int64.
    """
    if metrics.dim() == 2:
        return metrics.double()
    worth = metrics.flatten(2)  # [B, L, H * N]
    ranked = worth.flatten(1).sort(dim=-1, descending=True).values
    number = (total.to(worth.device) * metrics.shape[2]).clamp(1, ranked.shape[-1])
    least = ranked.gather(-1, number[:, None] - 1)[..., None]
    better = (worth > least).sum(-1)
    equal = ((worth == least) & (worth > -torch.inf)).sum(-1)
    left = number[:, None] - better.sum(-1, keepdim=True)
    taken = (left - (equal.cumsum(-1) - equal)).clamp_min(0).minimum(equal)
    return (better + taken).double()
