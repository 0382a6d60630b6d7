"""A2SF: accumulated attention that is forgotten over time."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from kvpolicy.protocols import Decay, DecodeMode, Needs, Scored, Scores, Seen, State, View
from kvpolicy.selectors.common import group_mean, keep_always
from kvpolicy.text.strategy import least, strategy, where

NEGLIGIBLE = 1e-7
"""Queries that count less than this are left out: less than fp32 tells of the newest one."""


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
    def needs(self) -> Needs:
        """Attention of the newest queries, or of all, and the attention of each decoded token."""
        if self.factor == 1:
            return Needs(attn_sum=True, decode_attn=True)
        queries = math.ceil(math.log(NEGLIGIBLE) / math.log(self.factor))
        return Needs(decay=Decay(max(queries, 1), self.factor), decode_attn=True)

    def observe(self, state: Scores, seen: Seen, view: View) -> State:
        """Add the attention of a prefill, after what was accumulated has been forgotten in part."""
        if self.factor == 1:
            assert seen.attn_sum is not None
            return Scores(state.score + group_mean(seen.attn_sum, view))
        assert seen.decayed_sum is not None and seen.added is not None
        left = torch.full_like(state.score[:, 0, 0], self.factor, dtype=torch.float64).pow(seen.added).float()
        return Scores(state.score * left[:, None, None] + group_mean(seen.decayed_sum, view))

    def step(self, state: Scores, row: Tensor, view: View) -> None:
        """Add the attention of a decoded token."""
        state.score.mul_(self.factor).add_(view.ranks.group_mean(row))

    def priority(self, state: Scores, view: View) -> Tensor:
        """The newest tokens are always kept, others by what they have accumulated: [B, H, N]."""
        return keep_always(state.score, view.newest((view.budget // 2).clamp(1, self.recent)))

    def attention(self, state: Scores) -> Tensor:
        """The accumulated attention of each token: [B, H, N]."""
        return state.score

    def statistic(self, seen: Seen, view: View) -> Tensor | None:
        """The attention of this forward, per query head."""
        return seen.attn_sum if self.factor == 1 else seen.decayed_sum
