"""TOVA: evict the tokens that the newest token attends to least."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpolicy.protocols import DecodeMode, Scored, Scores, State, View
from kvpolicy.statistics import GeneratedAttention, RecentQueries, Results, Statistic
from kvpolicy.text.strategy import strategy


@strategy
class TOVA(Scored):
    """Evict the tokens that the newest token attends to least, the same ones in all heads of a layer.

    Args:
        decode: `evict` evicts one token for each generated one; `grow` keeps generated tokens in addition to
            the budget.

    Examples:
        >>> from kvpolicy import Policy
        >>> Policy.parse("tova").budget
        0.2

    Source:
        TOVA (arXiv:2401.06104), Section 4, and its authors' code. Differences:

        - A prompt keeps its newest token, whatever that attends to; the code may evict it at once. In the next step it
          competes with the others by its own attention, and so does every generated token, as in the code.
        - The eviction for a new token happens just before its attention, by that of the token before it. The code
          attends to one token more and then evicts by the same row.
        - Tokens keep their original rotary positions. The code has an option that closes wide gaps between positions.
        - Of equal scores, the earlier position is kept. The code leaves ties to `topk`.
    """

    decode: DecodeMode = "evict"

    compares_heads: ClassVar[bool] = True
    nested_from: ClassVar[int | None] = 1

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The attention of the newest token of a prefill, and of each decoded token."""
        return (RecentQueries(1), GeneratedAttention(of_all_slots=True, of_all_heads=True))

    def observe(self, state: Scores, seen: Results, view: View) -> State:
        """Score by the attention of the newest query, averaged over all heads."""
        newest = view.ranks.head_mean(seen[RecentQueries].sum(torch.ones_like(view.length)))
        return Scores(newest[:, None].expand(-1, view.positions.shape[1], -1).contiguous())

    def step(self, state: Scores, row: Tensor, view: View) -> None:
        """Score by the attention of the decoded token, averaged over all heads."""
        # A mean over heads slot by slot is correct, because all heads keep the same tokens in the same slots.
        newest = view.ranks.head_mean(row.flatten(1, 2), torch.float64)  # copied as it is summed: one operation less
        state.score.copy_(newest[:, None].expand_as(state.score))

    def statistic(self, seen: Results, view: View) -> Tensor | None:
        """The attention of the newest query, per query head."""
        return seen[RecentQueries].sum(torch.ones_like(view.length))
