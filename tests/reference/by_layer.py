"""Tokens of each layer under one budget in bytes, by trying every factor."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction


def tokens_that_fit(
    shares: list[str], floors: list[int], most: int, nbytes: Callable[[list[int]], int], limit: int
) -> list[int] | None:
    """The largest tokens by layer, in proportion to `shares`, whose bytes are at most `limit`.

    The layer of the largest share gets 0, 1, 2 and so on tokens, the others the same multiple of their shares, rounded
    down; no layer less than its floor or more than `most`.
    """
    largest = max(map(Fraction, shares))
    best: list[int] | None = None
    count = 0
    while True:
        keep = [
            max(min(int(Fraction(share) / largest * count), most), floor)
            for share, floor in zip(shares, floors, strict=True)
        ]
        if nbytes(keep) > limit:
            return best
        best = keep
        if all(tokens >= most for tokens in keep):
            return best
        count += 1
