"""Scissorhands: evict the tokens that recent queries have ignored most often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpolicy.protocols import DecodeMode, Scored, Scores, State, View
from kvpolicy.selectors.common import group_mean, keep_always
from kvpolicy.statistics import Context, GeneratedAttention, NewestWindow, Results, Statistic
from kvpolicy.statistics.windows import Past, QueryWindow
from kvpolicy.text.strategy import least, strategy

BELOW_MEAN = 1 - 1e-4
"""The multiple of the mean attention below which a weight counts as less: equal weights differ by rounding only."""


@dataclass(frozen=True)
class BelowMean(NewestWindow[Tensor]):
    """How many of the newest queries attend to a token less than to the mean of the tokens that they see.

    Attributes:
        width: How many queries of each row.
        window: The queries so far; None before a prompt.
    """

    width: int
    window: QueryWindow | None = None
    along: ClassVar = "heads"

    def described(self) -> str:
        """Which tokens are ignored."""
        return f"which tokens the last {self.width:,} queries attend to less than the mean"

    def reduced(self, context: Context) -> Tensor:
        """How many of the queries ignore each candidate."""

        def ignored(weights: Tensor, part: slice, tile: QueryWindow) -> Tensor:
            seen = _visible(tile, context.keys, context.past, context.valid)[..., : weights.shape[-1]]
            seen = seen.repeat_interleave(weights.shape[1] // context.keys.shape[1], 1)  # [B, Hq, W, S + P]
            return (weights.mul_(seen.sum(-1, keepdim=True)).lt(BELOW_MEAN) & seen).sum(2)

        return self.summed(context, ignored)


@strategy
class Scissorhands(Scored):
    """Evict the tokens that most of the recent queries have ignored.

    A query ignores a token if it attends to it less than to the mean of the tokens that it sees. A token that was
    important once stays important, so what few queries have ignored is kept.

    Args:
        window: How many of the newest queries count.
        recent: How many of the newest tokens are always kept; at most half the budget.
        sinks: How many of the first tokens are always kept.
        decode: Whether generated tokens compete for the budget (`evict`) or are kept in addition to it (`grow`).

    Raises:
        KVPolicyError: If `window` or `recent` is below 1, or `sinks` below 0.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("scissorhands:window=200@0.2"))
        'scissorhands:window=200@0.2'

    Source:
        Scissorhands (arXiv:2305.17118), Algorithm 2. Differences:

        - The paper counts in a strict window of queries, which would need a bit per query and slot. Here a prompt is
          counted in such a window, each generated token first takes its share, 1 / `window`, from every count, and a
          prompt or chunk of n tokens n / `window`.
        - One token is evicted for each generated one. The paper drops half of its buffer whenever that is full.
        - With grouped-query attention, counts are averaged over the query heads of a KV head. The paper has none.
        - A query ignores a token only if it attends to it less than the mean by more than rounding, a ten-thousandth.
        - Counts often tie: the earlier position is kept.
        - `recent` shrinks to half the budget, and `sinks` is an addition.
    """

    window: int = least(1, 400)
    recent: int = least(1, 10)
    sinks: int = least(0, 0)
    decode: DecodeMode = "evict"

    nested_from: ClassVar[int | None] = 1

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """Which tokens the newest queries of a prompt ignore, and the attention of each decoded token."""
        return (BelowMean(self.window), GeneratedAttention())

    @property
    def min_tokens(self) -> int:
        return self.sinks + 1

    def observe(self, state: Scores, seen: Results, view: View) -> State:
        """Count the newest queries of a prompt that ignore each token; earlier queries leave the window."""
        assert view.added is not None
        left = (1 - view.added / self.window).clamp_min(0).float()
        return Scores(state.score * left[:, None, None] + group_mean(seen[BelowMean], view))

    def step(self, state: Scores, row: Tensor, view: View) -> None:
        """Count the tokens that a decoded token ignores."""
        seen = view.valid
        ignored = (row * seen.sum(-1)[..., None, None] < BELOW_MEAN) & seen[:, :, None]
        state.score.mul_(1 - 1 / self.window).add_(view.ranks.group_mean(ignored.float()))

    def priority(self, state: Scores, view: View) -> Tensor:
        """Sinks and the newest tokens are always kept, other tokens by how few queries ignored them: [B, H, N]."""
        recent = torch.minimum(view.budget // 2, view.budget - self.sinks).clamp(1, self.recent)
        return keep_always(-state.score, view.newest(recent) | (view.positions < self.sinks))

    def statistic(self, seen: Results, view: View) -> Tensor | None:
        """Minus the number of the newest queries that ignore the token, per query head."""
        return -seen[BelowMean]


def _visible(window: QueryWindow, k: Tensor, past: Past | None, valid: Tensor | None) -> Tensor:
    """Which past slots and new tokens each query sees, [B, H, W, S + P] bool."""
    heads, new = k.shape[1:3]
    seen = torch.arange(new, device=k.device) <= window.at[..., None]  # none where a query is absent, at -1
    if valid is not None:
        seen = seen & valid[:, None]
    every = seen[:, None].expand(-1, heads, -1, -1)
    if past is None:
        return every
    there = (window.at >= 0)[:, None, :, None] & past.occupied[:, :, None]
    return torch.cat([there, every], -1)
