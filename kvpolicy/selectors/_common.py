"""What selectors share: a state of one score per slot, and the mean over the query heads of a KV head."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.protocols import View
from kvpolicy.spec.errors import KVPolicyError


class Scores(NamedTuple):
    """One score per slot, [B, H, S] fp32."""

    score: Tensor


def empty_scores(batch: int, heads: int, slots: int, device: torch.device | str) -> Scores:
    """Scores of zero."""
    return Scores(torch.zeros(batch, heads, slots, dtype=torch.float32, device=device))


def group_mean(statistic: Tensor, view: View) -> Tensor:
    """Mean over the query heads of each KV head: [B, Hq, N] -> [B, H, N]."""
    return view.ranks.group_mean(statistic.unflatten(1, (view.positions.shape[1], -1)))


def keep_always(priority: Tensor, protected: Tensor) -> Tensor:
    """`priority` [B, H, N], replaced by inf for the tokens in `protected`."""
    return priority.masked_fill(protected, torch.inf)


def by_position(positions: Tensor) -> Tensor:
    """Higher priority for later tokens; exact in fp32 up to position 16,777,216."""
    return positions.float()


def check_decode(decode: str) -> None:
    """Raise KVPolicyError unless `decode` is a `DecodeMode`."""
    if decode not in ("evict", "grow"):
        raise KVPolicyError(f"decode must be one of 'evict', 'grow', got {decode!r}; try 'evict'.")
