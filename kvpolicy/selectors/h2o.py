"""H2O: keep recent tokens and heavy hitters."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from kvpolicy.protocols import DecodeMode, Scored, Scores, State, View
from kvpolicy.selectors.common import group_mean, keep_always, recent_tokens
from kvpolicy.statistics import AttentionSum, GeneratedAttention, Results, Statistic
from kvpolicy.text.strategy import between, strategy


@strategy
class H2O(Scored):
    """Keep the newest tokens, and those that have received the most attention so far.

    Attention is summed over all queries, from the first prompt token to the last generated one.

    Args:
        recent: Fraction of the budget for the window of newest tokens, in [0, 1], and always the newest token; the
            rest is for heavy hitters.
        decode: `evict` continues to accumulate and evict during generation; `grow` keeps generated tokens in addition
            to the budget.

    Raises:
        KVPolicyError: If `recent` is outside [0, 1].

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("h2o:recent=0.25@0.1"))
        'h2o:recent=0.25@0.1'

    Source:
        H2O (arXiv:2306.14048), Algorithm 1, and its authors' code. Differences:

        - With grouped-query attention, the sums are averaged over the query heads of a KV head. The paper has none.
        - The column sums of the prompt are computed in tiles, without an N x N matrix.
        - The eviction for a new token happens just before its attention, so that at most `budget` tokens are attended
          to. The code attends to one more, then evicts: the same choice.
        - Eviction is final, as in the form of the code that drops tokens. In the form that masks them, a token that
          leaves the recent window may come back after a step.
        - The rows of a batch are independent. The code sums over them.
        - `recent` is a fraction of the budget. The code has two sizes, equal by default.
    """

    recent: float = between(0, 1, 0.5)
    decode: DecodeMode = "evict"

    compares_heads: ClassVar[bool] = True
    nested_from: ClassVar[int | None] = 1

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """Attention sums over all queries, and the attention of each decoded token."""
        return (AttentionSum(), GeneratedAttention())

    def observe(self, state: Scores, seen: Results, view: View) -> State:
        """Add the attention of a prefill."""
        return Scores(state.score + group_mean(seen[AttentionSum], view))

    def step(self, state: Scores, row: Tensor, view: View) -> None:
        """Add the attention of a decoded token."""
        state.score.add_(view.ranks.group_mean(row))

    def priority(self, state: Scores, view: View) -> Tensor:
        """The window is always kept, other tokens by accumulated attention: [B, H, N]."""
        return keep_always(state.score, recent_tokens(view, self.recent))

    def attention(self, state: Scores) -> Tensor:
        return state.score

    def statistic(self, seen: Results, view: View) -> Tensor | None:
        """Attention summed over the queries of this forward, per query head."""
        return seen[AttentionSum]
