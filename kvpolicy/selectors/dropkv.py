"""DropKV: keep the tokens without which the outputs of the last queries would change most."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.protocols import DecodeMode, Scored, Scores, State, View
from kvpolicy.selectors.common import half_budget, keep_always
from kvpolicy.statistics import RecentQueries, Results, Statistic, Vectors
from kvpolicy.text.strategy import least, odd, strategy

LEAST_REST = 1e-5
"""Where the other tokens have less of a query's attention together, the whole output counts as lost."""

EQUAL = 1e-10
"""The square of a difference, over the squares of what is compared, below which it is rounding."""


@strategy
class DropKV(Scored):
    """Keep the tokens without which the attention outputs of the last queries would change most.

    Without a token of weight p and value v, an output o changes by exactly p / (1 - p) |v - o|. The squares are summed
    over the queries of an observation window, which itself is always kept.

    Args:
        window: The number of queries in the observation window; at most half the budget is used.
        kernel: Width of the pooling of losses along the tokens, odd; 1 for no pooling.
        decode: `evict`: the window slides. Generated tokens that leave it have no score and are evicted first; those of
            the prompt's window compete by their scores. `grow`: generated tokens are kept in addition to the budget.

    Raises:
        KVPolicyError: If `window` or `kernel` is below 1, or `kernel` is even or above 32767.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("uniform/adakv+dropkv@0.2"))
        'uniform/adakv+dropkv@0.2'

    Source:
        DropKV, from its author's description in a discussion of kvpress, and the press that they proposed there (no
        paper was read); the closed form is exact. Differences:

        - The window shrinks to half the budget.
        - Generated tokens count toward the budget; `decode=grow` keeps them in addition.
        - The squares of the query heads of a KV head are summed, which ranks as their mean in the press.
        - Outputs are those before the output projection.
        - Where the other tokens have less than 1e-5 of the attention together, the loss is the whole output.
        - p / (1 - p) is exact; the press adds 1e-6 to its denominator.
    """

    window: int = least(1, 32)
    kernel: int = odd(7)
    decode: DecodeMode = "evict"

    compares_heads: ClassVar[bool] = True

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The attention of the observation window, and the values of the prompt."""
        return (RecentQueries(self.window), Vectors())

    def observe(self, state: Scores, seen: Results, view: View) -> State:
        """Score every candidate by the squared change of the window's outputs without it."""
        window_attn = seen[RecentQueries].weights
        values = seen[Vectors].values.masked_fill(~view.valid[..., None], 0).double()  # invalid ones may be inf
        age = torch.arange(window_attn.shape[2] - 1, -1, -1, device=values.device)
        counts = (age < self._width(view)[:, None])[:, None, None, :, None]
        weights = window_attn.unflatten(1, (values.shape[1], -1)).masked_fill(~counts, 0)
        loss = values.new_zeros(weights.shape[:2] + weights.shape[-1:])
        for g in range(weights.shape[2]):  # in fp64 besides, which takes much memory
            loss += squared_losses(weights[:, :, g].double(), values).sum(2)
        # Ranks that hold the same KV head have different query heads of it: their mean, as often as they are, is a sum.
        whole = view.ranks.group_mean(loss[:, :, None]) * view.ranks.replicas
        return Scores(F.avg_pool1d(whole, self.kernel, 1, self.kernel // 2).float())

    def priority(self, state: Scores, view: View) -> Tensor:
        """The window is always kept, other tokens by the change without them: [B, H, N]."""
        return keep_always(state.score, view.newest(self._width(view)))

    def statistic(self, seen: Results, view: View) -> Tensor | None:
        """The attention of the window, per query head."""
        return seen[RecentQueries].sum(self._width(view))

    def _width(self, view: View) -> Tensor:
        return half_budget(view, self.window)


def squared_losses(weights: Tensor, values: Tensor) -> Tensor:
    """The square by which each output would change without each token, [B, H, W, N] fp64.

    What is left of an output without a token is a difference of two large numbers if the token has most of the
    attention, so this needs fp64.

    Args:
        weights: Attention of W queries, [B, H, W, N] fp64; with learned sinks their sum is below 1.
        values: [B, H, N, D] fp64.
    """
    total = weights.sum(-1, keepdim=True)
    is_whole = (total - 1).abs() < LEAST_REST
    weights = torch.where(is_whole, weights / total, weights)  # rounding of fp32 weights is no sink
    rest = torch.where(is_whole, 1.0, total) - weights + torch.where(is_whole, 0.0, 1 - total)
    outputs = weights @ values
    length = values.square().sum(-1)[:, :, None]
    along = outputs @ values.mT
    size = outputs.square().sum(-1)[..., None]
    # The rest of the output is r = (o - p v) / (1 - p), and the change is p |v - r|.
    some = rest.clamp_min(LEAST_REST)
    left = ((size - 2 * weights * along + weights.square() * length) / some.square()).clamp_min(0)
    apart = length + left - 2 * (along - weights * length) / some
    apart = apart.masked_fill(apart < EQUAL * (length + left), 0)
    loss = torch.where(rest < LEAST_REST, length, weights.square() * apart)
    return loss.masked_fill(total == 0, 0)
