"""Tokens that few of the last queries have ignored."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ..coding import Config
from ._common import kept_if_newest, mean_over

DEFAULTS: Config = {"window": 400, "recent": 10, "sinks": 0}
SMALL = "scissorhands:window=8:recent=3"

MEAN = 1 - 1e-4
"""Below this multiple of the mean, a weight is below the mean."""


def smallest_budget(config: Config) -> int:
    """The sinks and one more."""
    return config["sinks"] + 1


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """Minus how often it was ignored; the first and the newest stay."""
    newest = max(1, min(config["recent"], budget // 2, budget - config["sinks"]))
    return math.inf if position < config["sinks"] else kept_if_newest(-score.real, position, length, newest)


def multiples(matrix: Tensor) -> list[list[float]]:
    """What each query gives to each token that it sees, in multiples of the mean."""
    count, tokens = matrix.shape
    visible = [tokens - count + i + 1 for i in range(count)]
    return [[weight * n for weight in row[:n]] for row, n in zip(matrix.tolist(), visible, strict=True)]


def ignored(matrix: Tensor, queries: int) -> list[float]:
    """How many of the last queries ignore each token."""
    rows = multiples(matrix)[-queries:]
    return [float(sum(j < len(row) and row[j] < MEAN for row in rows)) for j in range(matrix.shape[1])]


def scores_after_prefill(
    config: Config, old: Sequence[complex], attention: list[Tensor], group: list[int], budget: int
) -> Sequence[complex]:
    """Count the last queries; of the older counts, as much leaves the window."""
    left = max(0.0, 1 - attention[0].shape[0] / config["window"])
    new = mean_over([ignored(attention[hq], config["window"]) for hq in group])
    return [a * left + b for a, b in zip(old, new, strict=True)]


def scores_after_decode(
    config: Config, old: Sequence[complex], attention: list[Tensor], group: list[int]
) -> Sequence[complex]:
    """Count one query more."""
    return scores_after_prefill(config, old, attention, group, 0)


def statistic(config: Config, matrix: Tensor) -> list[float]:
    """Minus how often each token was ignored."""
    return [-x for x in ignored(matrix, config["window"])]


def closeness(config: Config, attention: list[Tensor]) -> float:
    """How near any weight is to the mean, relatively: there, rounding decides."""
    rows = [row for matrix in attention for row in multiples(matrix)]
    return min(abs(x / MEAN - 1) for row in rows for x in row)
