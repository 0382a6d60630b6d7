"""Tokens that are scored once, in groups: those without a score rank above those that have one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.protocols import State, View
from kvpolicy.selectors.common import first_tokens, keep_always


class OnceScored(NamedTuple):
    """The score of each token, once it has one.

    Attributes:
        score: [B, H, S] fp32.
        scored: Whether the token has a score, [B, H, S] bool.
    """

    score: Tensor
    scored: Tensor


def none_scored(batch: int, heads: int, slots: int, device: torch.device | str) -> OnceScored:
    """No token has a score."""
    score = torch.zeros(batch, heads, slots, dtype=torch.float32, device=device)
    return OnceScored(score, torch.zeros(score.shape, dtype=torch.bool, device=device))


def unscored(state: OnceScored, view: View, most_sinks: int) -> Tensor:
    """Which tokens are to be scored, [B, H, N] bool."""
    return view.valid & ~state.scored & ~first_tokens(view, most_sinks)


def priority_of(state: OnceScored, view: View, most_sinks: int) -> Tensor:
    """Sinks and the newest token are always kept, then tokens without a score, by age: [B, H, N].

    Scores must be below 1.
    """
    priority = torch.where(state.scored, state.score, 1 + view.positions.float())
    return view.keep_newest(keep_always(priority, first_tokens(view, most_sinks)))


def with_scores(state: OnceScored, score: Tensor, which: Tensor) -> State:
    """The state after the tokens `which` [B, H, N] got a score."""
    return OnceScored(torch.where(which, score, state.score), state.scored | which)
