"""One rule for every statement that something is better or worse: an interval beyond a difference that matters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from kvpolicy.text.errors import KVPolicyError

MARGIN = 0.01
"""The default of the least difference that matters.

One right answer in a hundred; of a divergence in nats, about one percent of the perplexity of what the full cache says.
"""

FEWEST = 20
"""Texts below which no verdict is given: bootstrap intervals of fewer are too narrow."""

Verdict = Literal["better", "worse", "mixed", "as good", "no worse", "unclear", "too few"]


def decide(
    intervals: Sequence[tuple[float, float]], count: int, margin: float = MARGIN, fewest: int = FEWEST
) -> Verdict:
    """The verdict about some differences, of which more is better.

    Args:
        intervals: The 95 % interval of each difference.
        count: On how many texts they were measured.
        margin: The least difference that matters, in the unit of the differences.
        fewest: The least number of texts of a verdict.

    Returns:
        `better` if an interval is above the margin and none below it on the other side, `worse` for the opposite,
        `mixed` for both. Else `as good` if all intervals are within the margin on both sides, `no worse` if none
        reaches below it, and `unclear` if one does. `too few` without enough texts.

    Raises:
        KVPolicyError: If the margin is negative or not finite.

    Examples:
        >>> decide([(0.02, 0.1)], 64), decide([(0.001, 0.002)], 64), decide([(-0.1, 0.2)], 64), decide([(0.5, 1)], 6)
        ('better', 'as good', 'unclear', 'too few')
    """
    check_margin(margin)
    if count < fewest:
        return "too few"
    above = any(low > margin for low, _ in intervals)
    below = any(high < -margin for _, high in intervals)
    if above or below:
        return "mixed" if above and below else "better" if above else "worse"
    if any(low < -margin for low, _ in intervals):
        return "unclear"
    return "as good" if all(high <= margin for _, high in intervals) else "no worse"


def check_margin(margin: float) -> None:
    """Refuse a margin that no difference could be compared with, before anything is measured.

    Raises:
        KVPolicyError: If it is negative or not finite.
    """
    if not (math.isfinite(margin) and margin >= 0):
        raise KVPolicyError(f"margin must be a number from 0, got {margin}; try {MARGIN}.")
