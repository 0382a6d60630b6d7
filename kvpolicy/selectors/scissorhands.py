"""Scissorhands: evict the tokens that recent queries have ignored most often."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvpolicy.protocols import BELOW_MEAN, DecodeMode, Needs, Scored, Scores, Seen, State, View
from kvpolicy.selectors.common import group_mean, keep_always
from kvpolicy.text.strategy import least, strategy


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
    def needs(self) -> Needs:
        """Which tokens the newest queries of a prompt ignore, and the attention of each decoded token."""
        return Needs(below_mean_queries=self.window, decode_attn=True)

    @property
    def min_tokens(self) -> int:
        return self.sinks + 1

    def observe(self, state: Scores, seen: Seen, view: View) -> State:
        """Count the newest queries of a prompt that ignore each token; earlier queries leave the window."""
        assert seen.below_mean is not None and seen.added is not None
        left = (1 - seen.added / self.window).clamp_min(0).float()
        return Scores(state.score * left[:, None, None] + group_mean(seen.below_mean, view))

    def step(self, state: Scores, row: Tensor, view: View) -> None:
        """Count the tokens that a decoded token ignores."""
        seen = view.valid
        ignored = (row * seen.sum(-1)[..., None, None] < BELOW_MEAN) & seen[:, :, None]
        state.score.mul_(1 - 1 / self.window).add_(view.ranks.group_mean(ignored.float()))

    def priority(self, state: Scores, view: View) -> Tensor:
        """Sinks and the newest tokens are always kept, other tokens by how few queries ignored them: [B, H, N]."""
        recent = torch.minimum(view.budget // 2, view.budget - self.sinks).clamp(1, self.recent)
        return keep_always(-state.score, view.newest(recent) | (view.positions < self.sinks))

    def statistic(self, seen: Seen, view: View) -> Tensor | None:
        """Minus the number of the newest queries that ignore the token, per query head."""
        assert seen.below_mean is not None
        return -seen.below_mean
