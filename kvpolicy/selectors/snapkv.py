"""SnapKV: keep the tokens that the last queries of the prompt attend to."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from kvpolicy.protocols import DecodeMode, Scored, Scores, State, View
from kvpolicy.selectors.common import group_mean, half_budget, keep_always
from kvpolicy.statistics import RecentQueries, Results, Statistic
from kvpolicy.text.strategy import least, odd, strategy


@strategy
class SnapKV(Scored):
    """Keep the tokens that the last queries of the prompt attend to, with their neighbors.

    The attention of an observation window is summed per token and pooled along the tokens, so that the neighbors of a
    token with a high score are kept too. The window itself is always kept.

    Args:
        window: The number of queries in the observation window; at most half the budget is used.
        kernel: Width of the pooling, odd; 1 for no pooling.
        pool: `avg` or `max`.
        decode: `evict`: the window slides. Generated tokens that leave it have no score and are evicted first; those of
            the prompt's window compete by their scores, so that the rest of the prompt's selection gives up at most
            `window` tokens. `grow`: generated tokens are kept in addition to the budget, as in the paper.

    Raises:
        KVPolicyError: If `window` or `kernel` is below 1, `kernel` is even or above 32767, or `pool` is unknown.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("snapkv:pool=max:kernel=5@256"))
        'snapkv:kernel=5:pool=max@256'

    Source:
        SnapKV (arXiv:2404.14469), Listing 1, and its authors' code. Differences:

        - `kernel` is 7, the authors' setting for LongBench (there with `pool=max`). The listing has 5, which is too
          narrow for values of four tokens. `window` and the average pooling, which pads with zeros, are those of the
          code.
        - The query heads of a KV head are averaged before pooling and keep the same tokens. The authors' code repeats
          the KV heads, and stores G times as much.
        - The window shrinks to half the budget. In the paper, a small budget is the window alone.
        - Generated tokens count toward the budget. In the paper the cache grows, as with `decode=grow`.
        - Pooling is over all candidate tokens, the window included, so that the last tokens before it share its
          attention; the paper's listing pools the tokens before the window alone, with zeros beyond. After a first
          chunk, the candidates are the kept and the new tokens.
        - Each chunk selects again with its own window.
    """

    window: int = least(1, 32)
    kernel: int = odd(7)
    pool: Literal["avg", "max"] = "avg"
    decode: DecodeMode = "evict"

    compares_heads: ClassVar[bool] = True

    @property
    def nested_from(self) -> int:
        """Twice the window: a smaller budget shrinks it."""
        return 2 * self.window

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The attention of the observation window."""
        return (RecentQueries(self.window),)

    def observe(self, state: Scores, seen: Results, view: View) -> State:
        """Score every candidate by the attention of the newest queries."""
        score = group_mean(seen[RecentQueries].sum(half_budget(view, self.window)), view)
        if self.pool == "avg":
            pooled = F.avg_pool1d(score, self.kernel, 1, self.kernel // 2)
        else:
            pooled = F.max_pool1d(score, self.kernel, 1, self.kernel // 2)
        return Scores(pooled)

    def priority(self, state: Scores, view: View) -> Tensor:
        """The window is always kept, other tokens by pooled attention: [B, H, N]."""
        return keep_always(state.score, view.newest(half_budget(view, self.window)))

    def attention(self, state: Scores) -> Tensor:
        return state.score

    def statistic(self, seen: Results, view: View) -> Tensor | None:
        """The attention of the window before pooling, per query head."""
        return seen[RecentQueries].sum(half_budget(view, self.window))
