"""Exact arithmetic with the shares that people write, such as 0.29."""

from __future__ import annotations

import math
from fractions import Fraction

Number = int | float | Fraction


def exact(number: Number) -> Fraction:
    """Read a number as it is written, so that 0.29 of 100 tokens is 29 and not 28."""
    return number if isinstance(number, Fraction) else Fraction(str(number))


def floor_share(share: Number, count: int) -> int:
    """The whole tokens in a share of `count`, rounded down."""
    return math.floor(exact(share) * count)


def ceil_share(share: Number, count: int) -> int:
    """The whole tokens in a share of `count`, rounded up."""
    return math.ceil(exact(share) * count)
