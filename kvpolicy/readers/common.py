"""Helpers shared by readers: the number of slots that are read."""

from __future__ import annotations

import math
from typing import Protocol

from torch import Tensor

from kvpolicy.protocols import Reader
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.limits import MAX_FIELD
from kvpolicy.text.strategy import AutoInt, checked

Amount = int | float
"""A number of tokens (int), or a fraction of a layer's slots (float)."""

LONG = 4096
"""From so many slots on, a page of `auto` is 16 slots."""

_EPSILON = 1e-9  # so that a fraction such as 0.07 of 100 slots is 7, and not 7.000...1 rounded up


def amount(default: Amount) -> Amount:
    """A field for the number of tokens that are read, or the fraction of a layer's slots.

    Examples:
        >>> from kvpolicy import Quest
        >>> Quest(read=0)
        Traceback (most recent call last):
        kvpolicy.KVPolicyError: Quest.read must be at least 1 token or a fraction above 0 and up to 1, got 0; try 256.
    """
    return checked(_check_amount, default)


def _check_amount(name: str, read: object) -> None:
    if isinstance(read, bool) or not isinstance(read, int | float):
        raise KVPolicyTypeError(f"{name} must be a number of tokens or a fraction, got {read!r}; try 256 or 0.05.")
    valid = 0 < read <= 1 if isinstance(read, float) else 1 <= read < MAX_FIELD
    if not valid:
        raise KVPolicyError(
            f"{name} must be at least 1 token or a fraction above 0 and up to 1, got {read!r}; try 256."
        )


def slots_read(read: Amount, slots: int, page: int = 1) -> int:
    """How many of `slots` slots are read: a multiple of the page, or all.

    Examples:
        >>> slots_read(0.05, 1000), slots_read(64, 1000, 16), slots_read(50, 1000, 16), slots_read(64, 40)
        (50, 64, 64, 40)
    """
    wanted = read if isinstance(read, int) else math.ceil(read * slots - _EPSILON)
    return min(slots, max(1, -(-wanted // page)) * page)


def page_means(vectors: Tensor, occupied: Tensor) -> Tensor:
    """Means of the vectors [B, H, n, page, D] of tokens, [B, H, n, D] fp64; 0 for a page without a token."""
    # In fp64, so that a mean does not depend on how many are computed at a time.
    total = vectors.double().masked_fill(~occupied[..., None], 0).sum(3)
    return total / occupied.sum(-1).clamp_min(1)[..., None]


def slots_of_page(page: AutoInt, slots: int) -> int:
    """Slots of a page in a layer with `slots` slots.

    Examples:
        >>> slots_of_page("auto", 4095), slots_of_page("auto", 4096), slots_of_page(8, 4096)
        (4, 16, 8)
    """
    if page == "auto":
        return 4 if slots < LONG else 16
    return page


class TokenReader(Reader, Protocol):
    """A reader that reads the fraction or number `read` of the slots."""

    __slots__ = ()

    read: Amount

    def count(self, slots: int) -> int:
        return slots_read(self.read, slots, self.page_size(slots))
