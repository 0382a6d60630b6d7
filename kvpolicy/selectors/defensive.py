"""DefensiveKV: keep the tokens that some query of the window attends to, weighted by what their values add."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.protocols import DecodeMode, Scored, Scores, State, View
from kvpolicy.selectors.common import half_budget, head_sum, keep_always, mean_output_norm
from kvpolicy.statistics import OutputNorms, RecentQueries, Results, Statistic
from kvpolicy.text.strategy import between, least, odd, strategy


@strategy
class DefensiveKV(Scored):
    """Keep the tokens that any query of a window attends to, weighted by what their values add to the output.

    A mean over an observation window assumes that attention stays as it was. Here a token has the largest attention of
    any query and query head, at least the mean of all tokens, since it may be needed later although nothing attends to
    it now. The weight is the norm of its value behind the output projection. The window itself is always kept.

    Args:
        window: The number of queries in the observation window; at most half the budget is used.
        kernel: Width of the pooling along the tokens, odd; 1 for no pooling.
        mass: Tokens that hold this fraction of the mean attention rank above all others, in [0, 1].
        decode: `evict`: the window slides, and tokens that leave it, which have no score, are evicted first. `grow`:
            generated tokens are kept in addition to the budget, as in the paper.

    Raises:
        KVPolicyError: If `window` or `kernel` is below 1, `kernel` is even or above 32767, or `mass` is no fraction.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("uniform/adakv+defensive@0.2"))
        'uniform/adakv+defensive@0.2'

    Source:
        DefensiveKV, from its authors' code (no formula of the paper was read). Differences:

        - The authors divide a layer's budget over its heads, which is `uniform/adakv+defensive:decode=grow` here. With
          equal heads, a token competes within its head only.
        - Generated tokens count toward the budget. The authors keep them in addition, as `decode=grow`.
        - The window shrinks to half the budget.
        - Each chunk selects again with its own window.
        - The authors subtract a bias of the window from `mass`, which in their code is measured after the window. It is
          left out.
        - The token with which `mass` is reached is among the first, and these rank by mean attention. In the authors'
          code it is not, and all of them have the largest score.
        - The weight of a token is over the sum of all heads that hold its position, which in later prompts may not be
          all.
    """

    window: int = least(1, 32)
    kernel: int = odd(5)
    mass: float = between(0, 1, 0.9)
    decode: DecodeMode = "evict"

    compares_heads: ClassVar[bool] = True

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The attention of the observation window, and the norms of values behind the output projection."""
        return (RecentQueries(self.window), OutputNorms())

    def observe(self, state: Scores, seen: Results, view: View) -> State:
        """Score every candidate by the largest attention of the window."""
        width = self._width(view)
        past = view.valid & ~view.newest(width)
        rows = _newest_rows(seen[RecentQueries].weights, width)
        queries = (rows.sum(-1) > 0).any(1).sum(-1).clamp_min(1)[:, None, None]  # a row may have fewer than `width`
        rows = rows.unflatten(1, (view.positions.shape[1], -1)).masked_fill(
            ~past[:, :, None, None], 0
        )  # [B, H, G, W, N]
        count = past.sum(-1, keepdim=True).clamp_min(1)
        largest = view.ranks.largest(_pooled(rows, past, self.kernel).amax((2, 3)))
        # A query may come that attends to any token as to most others.
        largest = largest.maximum(largest.sum(-1, keepdim=True) / count)
        norm = mean_output_norm(seen, view)
        weight = norm / head_sum(norm, view).clamp_min(torch.finfo(torch.float32).tiny)
        score = (largest * weight).float()
        mean = view.ranks.group_mean(rows.sum(3))
        first = self._first(mean, past, (view.budget - width).clamp_min(0))
        # No score is above 1: neither a weight nor an attention is.
        return Scores(torch.where(first, 1 + mean / queries, score).masked_fill(~past, 0))

    def priority(self, state: Scores, view: View) -> Tensor:
        """The window is always kept, other tokens by score: [B, H, N]."""
        return keep_always(state.score, view.newest(self._width(view)))

    def statistic(self, seen: Results, view: View) -> Tensor | None:
        """The attention of the window, per query head."""
        return seen[RecentQueries].sum(self._width(view))

    def _width(self, view: View) -> Tensor:
        return half_budget(view, self.window)

    def _first(self, mean: Tensor, past: Tensor, most: Tensor) -> Tensor:
        """Tokens of the past that hold the first `mass` of the mean attention, at most `most` [B], [B, H, N] bool."""
        ranked = mean.masked_fill(~past, -1)
        order = ranked.argsort(dim=-1, descending=True, stable=True)
        held = ranked.gather(-1, order).clamp_min(0).double()
        before = held.cumsum(-1) - held
        place = torch.arange(order.shape[-1], device=order.device)
        taken = (before < self.mass * held.sum(-1, keepdim=True)) & (place < most[:, None, None])
        return torch.zeros_like(past).scatter_(-1, order, taken & past.gather(-1, order))


def _newest_rows(window_attn: Tensor, width: Tensor) -> Tensor:
    """Attention rows [B, Hq, W, N] with those before each row's newest `width` [B] queries set to 0."""
    age = torch.arange(window_attn.shape[2] - 1, -1, -1, device=window_attn.device)
    return window_attn.masked_fill((age >= width[:, None])[:, None, :, None], 0)


def _pooled(rows: Tensor, past: Tensor, kernel: int) -> Tensor:
    """Rows [B, H, G, W, N] pooled along the tokens of the past [B, H, N], each with the mass that it had."""
    pooled = F.avg_pool1d(rows.flatten(0, -3), kernel, 1, kernel // 2).view_as(rows)
    pooled = pooled.masked_fill(~past[:, :, None, None], 0)  # what reached beyond the ends
    mass = pooled.sum(-1, keepdim=True)
    return pooled * (rows.sum(-1, keepdim=True) / mass.clamp_min(torch.finfo(torch.float32).tiny))
