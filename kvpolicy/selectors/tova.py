"""TOVA: drop what the newest token looks at least."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.protocols import DecodeMode, Needs, Seen, State, View
from kvpolicy.selectors._common import Scores, check_decode, empty_scores, keep_always
from kvpolicy.spec.validation import check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class TOVA:
    """Drop the tokens that the newest token attends to least, one choice for all heads of a layer.

    Args:
        decode: `evict` drops one token for each generated one; `grow` gives generated tokens room.

    Examples:
        >>> from kvpolicy import Policy
        >>> Policy.parse("tova").budget
        0.2

    Source:
        TOVA (arXiv:2401.06104), Section 4. Differences: the newest token itself is never dropped by its own
        attention; the eviction for a new token happens just before its attention, by the row of the token before.
    """

    decode: DecodeMode = "evict"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        check_fields(self)
        check_decode(self.decode)

    @property
    def needs(self) -> Needs:
        """The newest row of a prefill, and each decoded row."""
        return Needs(window_queries=1, decode_attn=True)

    @property
    def min_tokens(self) -> int:
        """One token, the current one."""
        return 1

    def alloc(self, batch: int, heads: int, slots: int, device: torch.device | str) -> State:
        """Scores of zero."""
        return empty_scores(batch, heads, slots, device)

    def observe(self, state: Scores, seen: Seen, view: View) -> State:
        """Score by the newest query, averaged over all heads."""
        newest = view.ranks.head_mean(seen.recent(torch.ones_like(view.length)))
        return Scores(newest[:, None].expand(-1, view.positions.shape[1], -1).contiguous())

    def step(self, state: Scores, row: Tensor, view: View) -> None:
        """Score by the token just decoded, averaged over all heads.

        Slots of different heads hold the same tokens in the same order, since all heads choose alike.
        """
        state.score.copy_(view.ranks.head_mean(row.flatten(1, 2))[:, None].expand_as(state.score))

    def priority(self, state: Scores, view: View) -> Tensor:
        """The newest token always, then by its attention: [B, H, N]."""
        return keep_always(state.score, view.newest(1))

    def statistic(self, seen: Seen, view: View) -> Tensor | None:
        """The newest query's attention per query head."""
        return seen.recent(torch.ones_like(view.length))
