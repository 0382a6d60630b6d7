"""Intervals of fractions of right answers."""

from __future__ import annotations

from typing import NamedTuple

from scipy.stats import binomtest


class Interval(NamedTuple):
    """A fraction of right answers, with its Wilson interval of 95 %.

    The answers of all tasks are pooled, so that the interval is that of these tasks, not of others.
    """

    low: float
    mean: float
    high: float

    def __str__(self) -> str:
        """The fraction, then the interval.

        >>> str(interval(15, 16))
        '0.94 (.72-.99)'
        """
        low, high = (f"{end:.2f}".removeprefix("0") for end in (self.low, self.high))
        return f"{self.mean:.2f} ({low}-{high})"


def interval(right: int, docs: int) -> Interval:
    """The interval of `right` answers among `docs`."""
    found = binomtest(right, docs).proportion_ci(method="wilson")
    return Interval(float(found.low), right / docs, float(found.high))
