"""SnapKV: keep what the last queries of the prompt look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.protocols import DecodeMode, Needs, Seen, State, View
from kvpolicy.selectors._common import Scores, check_decode, empty_scores, group_mean, keep_always
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.validation import check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapKV:
    """Keep the tokens that the last queries of the prompt attend to, with their neighbours.

    The attention of an observation window is summed per token and pooled along the tokens, so that what stands
    next to a hit is kept with it. The window itself is kept.

    Args:
        window: Queries in the observation window; never more than half the budget.
        kernel: Width of the pooling, odd; 1 pools nothing.
        pool: `avg` or `max`.
        decode: `evict`: the window slides, and what leaves it unscored goes first, so that the prompt's choice
            stays; `grow`: generated tokens get room of their own, as in the paper.

    Raises:
        KVPolicyError: If `window` or `kernel` is below 1, `kernel` is even or above 32767, or `pool` is unknown.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("snapkv:pool=max:kernel=7@256"))
        'snapkv:kernel=7:pool=max@256'

    Source:
        SnapKV (arXiv:2404.14469), Listing 1. Differences: grouped-query heads are averaged before pooling and share
        one choice (the authors' code repeats the KV heads, and stores G times as much); the window shrinks to half
        the budget; neighbours are neighbours among the tokens on offer, which after a first chunk are the kept ones;
        chunks choose again with their own window.
    """

    window: int = 32
    kernel: int = 5
    pool: Literal["avg", "max"] = "avg"
    decode: DecodeMode = "evict"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        check_fields(self)
        check_decode(self.decode)
        if self.window < 1:
            raise KVPolicyError(f"window={self.window} observes nothing: use 1 or more.")
        if not 1 <= self.kernel < 2**15 or self.kernel % 2 == 0:
            raise KVPolicyError(f"kernel={self.kernel} is even or out of range: use an odd number from 1 to 32767.")
        if self.pool not in ("avg", "max"):
            raise KVPolicyError(f"pool={self.pool!r} is unknown: use 'avg' or 'max'.")

    @property
    def needs(self) -> Needs:
        """The rows of the observation window."""
        return Needs(window_queries=self.window)

    @property
    def min_tokens(self) -> int:
        """One token, the current one."""
        return 1

    def alloc(self, batch: int, heads: int, slots: int, device: torch.device | str) -> State:
        """Scores of zero."""
        return empty_scores(batch, heads, slots, device)

    def observe(self, state: Scores, seen: Seen, view: View) -> State:
        """Score every token on offer by the newest queries."""
        score = group_mean(seen.recent(self._width(view)), view)
        if self.pool == "avg":
            pooled = F.avg_pool1d(score, self.kernel, 1, self.kernel // 2)
        else:
            pooled = F.max_pool1d(score, self.kernel, 1, self.kernel // 2)
        return Scores(pooled)

    def step(self, state: Scores, row: Tensor, view: View) -> None:
        """Generated tokens stay unscored."""

    def priority(self, state: Scores, view: View) -> Tensor:
        """The window always, then by pooled attention: [B, H, N]."""
        return keep_always(state.score, view.newest(self._width(view)))

    def statistic(self, seen: Seen, view: View) -> Tensor | None:
        """The window's attention per query head, before pooling."""
        return seen.recent(self._width(view))

    def _width(self, view: View) -> Tensor:
        return (view.budget // 2).clamp(1, self.window)
