"""Tokens that the last queries of the prompt look at, pooled over neighbors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..coding import Config
from ._common import column_sums, kept_if_newest, mean_over, pool

DEFAULTS: Config = {"window": 32, "kernel": 7, "pool": "avg"}
SMALL = "snapkv:window=6:kernel=3"


def observation_window(config: Config, budget: int) -> int:
    """The last queries, at most as many as half of the budget."""
    return max(1, min(config["window"], budget // 2))


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """The pooled attention; the window itself stays."""
    return kept_if_newest(score.real, position, length, observation_window(config, budget))


def scores_after_prefill(
    config: Config, old: Sequence[complex], attention: list[Tensor], group: list[int], budget: int
) -> Sequence[complex]:
    """What the last queries gave, pooled."""
    window = observation_window(config, budget)
    seen = mean_over([column_sums(attention[hq], window) for hq in group])
    return pool(seen, config["kernel"], config["pool"])
