"""Tokens that all queries so far have looked at most."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..coding import Config
from ..exact import ceil_share
from ._common import column_sums, kept_if_newest, mean_over

DEFAULTS: Config = {"recent": 0.5}


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """The attention received; a share of the budget is for the newest."""
    return kept_if_newest(score.real, position, length, max(1, ceil_share(config["recent"], budget)))


def scores_after_prefill(
    config: Config, old: Sequence[complex], attention: list[Tensor], group: list[int], budget: int
) -> Sequence[complex]:
    """Add what every query gave."""
    return scores_after_decode(config, old, attention, group)


def scores_after_decode(
    config: Config, old: Sequence[complex], attention: list[Tensor], group: list[int]
) -> Sequence[complex]:
    """Add what the generated token gave."""
    seen = mean_over([column_sums(attention[hq]) for hq in group])
    return [a + b for a, b in zip(old, seen, strict=True)]


def statistic(config: Config, matrix: Tensor) -> list[float]:
    """What every query gave."""
    return column_sums(matrix)
