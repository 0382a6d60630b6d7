"""Tokens that much was looked at of late: with every query, what was counted before shrinks by a factor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..coding import Config
from ._common import kept_if_newest, mean_over

DEFAULTS: Config = {"factor": 0.95, "recent": 16}
SMALL = "a2sf:factor=0.8:recent=4"


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """What a token has been given; the newest stay."""
    return kept_if_newest(score.real, position, length, max(1, min(config["recent"], budget // 2)))


def statistic(config: Config, matrix: Tensor) -> list[float]:
    """What one query head gave to each token, query after query."""
    given = [0.0] * matrix.shape[1]
    for row in matrix.tolist():
        given = [config["factor"] * before + new for before, new in zip(given, row, strict=True)]
    return given


def scores_after_prefill(
    config: Config, old: Sequence[complex], attention: list[Tensor], group: list[int], budget: int
) -> Sequence[complex]:
    """Forget as often as there are queries, and add what these gave."""
    left = config["factor"] ** attention[group[0]].shape[0]
    given = mean_over([statistic(config, attention[hq]) for hq in group])
    return [left * before + new for before, new in zip(old, given, strict=True)]


def scores_after_decode(
    config: Config, old: Sequence[complex], attention: list[Tensor], group: list[int]
) -> Sequence[complex]:
    """The same with one query."""
    return scores_after_prefill(config, old, attention, group, 0)
