"""Tokens that the newest token looks at, in the mean of all heads."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..coding import Config
from ._common import column_sums, kept_if_newest, mean_over

DEFAULTS: Config = {}


def observation_window(config: Config, budget: int) -> int:
    """One query."""
    return 1


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """The attention received from the newest token, which itself stays."""
    return kept_if_newest(score.real, position, length, 1)


def scores_after_prefill(
    config: Config, old: Sequence[complex], attention: list[Tensor], group: list[int], budget: int
) -> Sequence[complex]:
    """What the newest query gave."""
    return mean_over([column_sums(matrix, 1) for matrix in attention])


def scores_after_decode(
    config: Config, old: Sequence[complex], attention: list[Tensor], group: list[int]
) -> Sequence[complex]:
    """What the generated token gave."""
    return mean_over([column_sums(matrix) for matrix in attention])
