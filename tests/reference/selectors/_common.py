"""What several selectors compute of attention, and what the engine does with priorities.

`attention[hq]` is the full matrix of query head hq, [n new queries, N tokens on offer], rows and columns in
ascending order of position.
"""

from __future__ import annotations

import math
from itertools import pairwise

from torch import Tensor

SMALLEST = 2.0**-126
"""The smallest normal number of fp32."""


def kept_if_newest(worth: float, position: int, length: int, newest: int) -> float:
    """What a token is worth where the newest ones of `length` tokens are always kept."""
    return math.inf if position >= length - newest else worth


def pool(scores: list[float], kernel: int, how: str) -> list[float]:
    """Pool along the tokens; what lies beyond the ends counts as zero."""
    half = kernel // 2
    pooled = []
    for j in range(len(scores)):
        near = [scores[i] if 0 <= i < len(scores) else 0.0 for i in range(j - half, j + half + 1)]
        pooled.append(sum(near) / kernel if how == "avg" else max(near))
    return pooled


def column_sums(matrix: Tensor, queries: int | None = None) -> list[float]:
    """Attention that each token received from all queries, or from the newest few."""
    rows = matrix.tolist()
    rows = rows if queries is None else rows[-queries:]
    return [sum(row[j] for row in rows) for j in range(len(rows[0]))]


def mean_over(lists: list[list[float]]) -> list[float]:
    """Elementwise mean of lists of equal length."""
    return [sum(column) / len(lists) for column in zip(*lists, strict=True)]


def top(priorities: list[float], count: int) -> list[int]:
    """Indices of the `count` highest priorities, ties to the earlier token, ascending."""
    order = sorted(range(len(priorities)), key=lambda j: (-priorities[j], j))
    return sorted(j for j in order[: max(count, 0)] if priorities[j] > -math.inf)


def evicted(priorities: list[float]) -> int:
    """Index of the token that leaves: the lowest priority, ties to the later token."""
    return min(range(len(priorities)), key=lambda j: (priorities[j], -j))


def margin(worth: list[float], doubt: list[float] | None = None) -> float:
    """The smallest relative gap between two numbers that differ: below fp32's noise, a choice is anyone's guess.

    Whole numbers, such as positions, are as exact in fp32.

    Args:
        worth: The numbers; infinite ones do not count.
        doubt: How many times more uncertain than usual each is, because numbers that are nearly equal were subtracted.
            One in infinite doubt is near every other.
    """
    doubts = [1.0] * len(worth) if doubt is None else doubt
    ranked = sorted((x, d) for x, d in zip(worth, doubts, strict=True) if math.isfinite(x))
    gaps = [math.inf]
    for (a, c), (b, d) in pairwise(ranked):
        if math.isinf(max(c, d)):
            gaps.append(0.0)
        elif a < b and not (float(a).is_integer() and float(b).is_integer()):
            gaps.append((b - a) / max(abs(a), abs(b)) / max(c, d))
    return min(gaps)
