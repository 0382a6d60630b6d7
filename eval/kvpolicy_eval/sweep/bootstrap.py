"""Bootstrap intervals over the examples of a task.

The seed is derived from the task's name, so that all policies are resampled with the same examples: the difference of
two arrays of draws is a paired one, and an average over tasks draws within each task.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

DRAWS = 2000
LEVEL = 0.95
STATISTICS = ("mean", "perplexity", "bits")
"""`mean` is of numbers; `perplexity` and `bits` are of pairs of a log-likelihood and a weight."""


def statistic_of(values: Sequence[Any], aggregate: float) -> str:
    """Name of the statistic by which lm-eval aggregated the examples; empty if it is none of `STATISTICS`.

    Args:
        values: A number or a pair for each example.
        aggregate: lm-eval's value over all examples.

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
        if np.isclose(_statistic(array[None], name)[0], aggregate, rtol=1e-5, atol=1e-8):
            return name
    return ""


def measured(values: Sequence[Any], aggregate: float) -> Sequence[Any]:
    """The examples without those that RULER marks with -1 because they have another length than the metric.

    Args:
        values: A number or a pair for each example.
        aggregate: lm-eval's value over all examples.

    Returns:
        The remaining examples if their mean is lm-eval's value, else all examples.

    Examples:
        >>> measured([-1.0, 0.5, 1.0, -1.0], 0.75)
        [0.5, 1.0]
    """
    remaining = [value for value in values if value != -1]
    return remaining if statistic_of(remaining, aggregate) == "mean" else values


def draws(values: Sequence[Any], task: str, statistic: str = "mean", count: int = DRAWS) -> Any:
    """The statistic of `count` resamples, [count].

    Args:
        values: A number or a pair for each example.
        task: Name of the task.
        statistic: One of `STATISTICS`.
        count: Number of resamples.
    """
    array = np.asarray(values, dtype=float)
    return np.concatenate([_statistic(array[part], statistic) for part in _indices(task, len(array), count)])


def interval(drawn: Any, level: float = LEVEL) -> tuple[float, float]:
    """The central interval that contains a share `level` of the draws.

    Examples:
        >>> interval(draws([1.0, 1.0], "task"))
        (1.0, 1.0)
    """
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _indices(task: str, examples: int, count: int) -> list[Any]:
    """Indices of the examples of each resample, in parts of bounded size."""
    generator = np.random.default_rng(zlib.crc32(task.encode()))
    step = max(1, 2_000_000 // examples)
    return [generator.integers(examples, size=(min(step, count - at), examples)) for at in range(0, count, step)]


def _statistic(values: Any, name: str) -> Any:
    """The statistic of each resample.

    Args:
        values: [R, N], or [R, N, 2] for pairs.
        name: One of `STATISTICS`.
    """
    if name == "mean":
        return values.mean(1)
    nats = -values[..., 0].sum(1) / values[..., 1].sum(1)
    return np.exp(nats) if name == "perplexity" else nats / np.log(2)
