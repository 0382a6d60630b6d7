"""Bootstrap over examples: how far a score would move with other examples of the same kind.

Examples are drawn by the task's name, so that two policies are always resampled alike: a difference of two arrays of
draws is a paired one, and an average over tasks draws within each task.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

DRAWS = 2000
LEVEL = 0.95
STATISTICS = ("mean", "perplexity", "bits")
"""`mean` of numbers; `perplexity` and `bits` of pairs of a log-likelihood and a weight."""


def statistic_of(values: Sequence[Any], found: float) -> str:
    """Name the statistic that turns `values` into `found`; nothing where none of ours does.

    Args:
        values: One number, or one pair, for each example.
        found: What lm-eval made of them.

    Examples:
        >>> statistic_of([0.0, 1.0], 0.5)
        'mean'
    """
    try:
        array = np.asarray(values, dtype=float)
    except (TypeError, ValueError):
        return ""
    if not array.size or not np.isfinite(array).all():
        return ""
    names = STATISTICS[1:] if array.ndim == 2 and array.shape[1] == 2 else STATISTICS[: array.ndim == 1]
    for name in names:
        if np.isclose(_statistic(array[None], name)[0], found, rtol=1e-5, atol=1e-8):
            return name
    return ""


def measured(values: Sequence[Any], found: float) -> Sequence[Any]:
    """Leave out the examples that RULER marks with -1, which are not of a column's length.

    Args:
        values: One number, or one pair, for each example.
        found: What lm-eval made of them.

    Returns:
        The others, where their mean is what lm-eval found; else all.

    Examples:
        >>> measured([-1.0, 0.5, 1.0, -1.0], 0.75)
        [0.5, 1.0]
    """
    rest = [value for value in values if value != -1]
    return rest if statistic_of(rest, found) == "mean" else values


def draws(values: Sequence[Any], task: str, statistic: str = "mean", count: int = DRAWS) -> Any:
    """The statistic of `count` resamples, [count].

    Args:
        values: One number, or one pair, for each example.
        task: Whose examples they are.
        statistic: One of `STATISTICS`.
        count: Resamples.
    """
    array = np.asarray(values, dtype=float)
    return np.concatenate([_statistic(array[part], statistic) for part in _indices(task, len(array), count)])


def interval(drawn: Any, level: float = LEVEL) -> tuple[float, float]:
    """The middle `level` of draws.

    Examples:
        >>> interval(draws([1.0, 1.0], "task"))
        (1.0, 1.0)
    """
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _indices(task: str, examples: int, count: int) -> list[Any]:
    """Which examples each resample takes, in parts of bounded size."""
    generator = np.random.default_rng(zlib.crc32(task.encode()))
    step = max(1, 2_000_000 // examples)
    return [generator.integers(examples, size=(min(step, count - at), examples)) for at in range(0, count, step)]


def _statistic(values: Any, name: str) -> Any:
    """Of the values of each resample, [R, N] or [R, N, 2]."""
    if name == "mean":
        return values.mean(1)
    likelihood, weight = values[..., 0].sum(1), values[..., 1].sum(1)
    bits = -likelihood / weight
    return np.exp(bits) if name == "perplexity" else bits / np.log(2)
