"""How many decode steps fit into a layer, and how many slots must be added for more."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.engine.token_batch import BEYOND

GROWTH_FACTOR = 8
MIN_GROWTH = 16
MAX_GROWTH = 256


def growth(tokens: Tensor) -> Tensor:
    """Tokens that a growing cache adds at a time if the number of tokens to come is unknown.

    An eighth of what each row holds, so that the reserve stays small beside short prompts, but no fewer than 16, so
    that buffers are not copied every few steps, and no more than 256.

    Args:
        tokens: Tokens of each row, [B] int64.

    Examples:
        >>> growth(torch.tensor([10, 490, 100_000])).tolist()
        [16, 61, 256]
    """
    return (tokens // GROWTH_FACTOR).clamp(MIN_GROWTH, MAX_GROWTH)


def free_steps(
    occupied: Tensor,
    budget: Tensor,
    expected_len: Sequence[int],
    *,
    grows: bool,
    buffer_room: Tensor | None,
) -> int:
    """Decode steps that are guaranteed to fit.

    Args:
        occupied: Tokens of each head, [B, H] int64.
        budget: The most tokens of each row, [B] int64.
        expected_len: Tokens that each row has slots for.
        grows: Whether generated tokens are kept in addition to the budget.
        buffer_room: Tokens that each head's full-precision buffer can take before a block must be demoted, [B, H];
            None without stages.
    """
    expected = torch.tensor(expected_len, device=occupied.device)
    # Without `grows`, a row whose budget fits into its slots evicts in place for ever. With it, a row ends where its
    # budget or its slots do: a budget may exceed all tokens that were announced.
    limit = torch.minimum(budget, expected) if grows else torch.where(budget > expected, expected, BEYOND)
    left = limit[:, None] - occupied
    if buffer_room is not None:  # a new token is in full precision, even where the evicted one was coded
        left = torch.minimum(left, buffer_room)
    return int(left.amin())


def may_exceed_plan(expected_len: Sequence[int], budget: Sequence[int]) -> bool:
    """Whether a row may hold more tokens than it has slots for."""
    return any(expected < most for expected, most in zip(expected_len, budget, strict=True))


def slots_needed(expected_len: Sequence[int], budget: Sequence[int], held: Sequence[int], *, grows: bool) -> list[int]:
    """Slots to add per row before the next step; see `growth`. Free ones that the budget does not use come first.

    Args:
        expected_len: Tokens that each row has slots for.
        budget: The most tokens of each row.
        held: Tokens in each row's fullest head.
        grows: Whether generated tokens are kept in addition to the budget.
    """
    steps = growth(torch.tensor(held, device="cpu")).tolist()
    rows = zip(expected_len, budget, held, steps, strict=True)
    if grows:
        return [
            max(0, count + step - expected) if count >= min(limit, expected) else 0
            for expected, limit, count, step in rows
        ]
    return [min(step, limit - expected) if expected <= count < limit else 0 for expected, limit, count, step in rows]


def merge_expected(old: Sequence[int], new: Sequence[int], idle: Sequence[bool] | None) -> list[int]:
    """The larger expected length of each row; the old one for rows that are `idle`."""
    merged = [max(pair) for pair in zip(old, new, strict=True)]
    if idle is None:
        return merged
    return [kept if skip else found for kept, found, skip in zip(old, merged, idle, strict=True)]


UNLIMITED = math.inf
"""Free steps of a layer in which every step evicts a token in place."""
