"""A2SF: accumulated attention that is forgotten over time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpolicy.protocols import DecodeMode, Scored, Scores, State, View
from kvpolicy.selectors.common import group_mean, half_budget, keep_always
from kvpolicy.statistics import AttentionSum, Context, GeneratedAttention, NewestWindow, Results, Statistic
from kvpolicy.statistics.windows import QueryWindow
from kvpolicy.text.strategy import least, strategy, where

NEGLIGIBLE = 1e-7
"""Queries that count less than this are left out: less than fp32 tells of the newest one."""


@dataclass(frozen=True)
class DecayedSum(NewestWindow[Tensor]):
    """Attention summed over the newest queries, each times a factor for every query behind it.

    Attributes:
        width: How many queries of each row.
        factor: What each of them counts over the next one, in (0, 1).
        window: The queries so far; None before a prompt.
    """

    width: int
    factor: float
    window: QueryWindow | None = None
    along: ClassVar = "heads"

    def described(self) -> str:
        """Their attention weights."""
        return f"the attention weights of the last {self.width:,} queries of the prompt, newer ones more"

    def reduced(self, context: Context) -> Tensor:
        """The sums, [B, Hq, N] fp32."""
        assert self.window is not None
        width = self.window.queries.shape[2]
        share = torch.full((width,), self.factor, dtype=torch.float64, device=context.keys.device)
        share = share.pow(torch.arange(width - 1, -1, -1, device=share.device)).float()
        return self.summed(context, lambda weights, part, tile: share[part] @ weights)


@strategy
class A2SF(Scored):
    """Keep the newest tokens, and those that have received the most attention, of which older attention counts less.

    Accumulated attention favors old tokens, to which more queries have attended. Here all that was accumulated is
    multiplied by a factor with each new query, so that a token is ranked by the attention of about the last 1 / (1 -
    factor) queries.

    Args:
        factor: What attention counts after one more query, in (0, 1]. With 1 it is never forgotten, as in H2O.
        recent: How many of the newest tokens are always kept; at most half the budget.
        decode: `evict` continues to accumulate and evict during generation; `grow` keeps generated tokens in addition
            to the budget.

    Raises:
        KVPolicyError: If `factor` is outside (0, 1], or `recent` is below 1.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("a2sf:factor=0.9@0.2"))
        'a2sf:factor=0.9@0.2'

    Source:
        A2SF (arXiv:2407.20485), Section 3, and its authors' code. Differences:

        - The factor applies to generated tokens too, as in the paper. The code applies it to prompts alone.
        - The query heads of a KV head are averaged, which ranks as their sum (the authors').
        - Queries of a prompt that count less than 1e-7 are left out.
        - Age counts the tokens of a row, without padding.
        - `recent` is at most half the budget.
    """

    factor: float = where(lambda factor: 0 < factor <= 1, "above 0 and at most 1", 0.95)
    recent: int = least(1, 16)
    decode: DecodeMode = "evict"

    compares_heads: ClassVar[bool] = True
    nested_from: ClassVar[int | None] = 1

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """Attention of the newest queries, or of all, and the attention of each decoded token."""
        if self.factor == 1:
            return (AttentionSum(), GeneratedAttention())
        queries = math.ceil(math.log(NEGLIGIBLE) / math.log(self.factor))
        return (DecayedSum(max(queries, 1), self.factor), GeneratedAttention())

    def observe(self, state: Scores, seen: Results, view: View) -> State:
        """Add the attention of a prefill, after what was accumulated has been forgotten in part."""
        if self.factor == 1:
            return Scores(state.score + group_mean(seen[AttentionSum], view))
        assert view.added is not None
        left = torch.full_like(state.score[:, 0, 0], self.factor, dtype=torch.float64).pow(view.added).float()
        return Scores(state.score * left[:, None, None] + group_mean(seen[DecayedSum], view))

    def step(self, state: Scores, row: Tensor, view: View) -> None:
        """Add the attention of a decoded token."""
        state.score.mul_(self.factor).add_(view.ranks.group_mean(row))

    def priority(self, state: Scores, view: View) -> Tensor:
        """The newest tokens are always kept, others by what they have accumulated: [B, H, N]."""
        return keep_always(state.score, view.newest(half_budget(view, self.recent)))

    def attention(self, state: Scores) -> Tensor:
        """The accumulated attention of each token: [B, H, N]."""
        return state.score

    def statistic(self, seen: Results, view: View) -> Tensor | None:
        """The attention of this forward, per query head."""
        return seen[AttentionSum] if self.factor == 1 else seen[DecayedSum]
