"""Tokens without any of which the outputs of the last queries would change most."""

from __future__ import annotations

import math

from ..coding import Config
from ._common import SMALLEST, kept_if_newest, margin
from ._look import Look
from ._outputs import apart, mixed, odds, rest

DEFAULTS: Config = {"window": 32}
SMALL = "dropkv:window=6"


def observation_window(config: Config, budget: int) -> int:
    """The last queries, at most as many as half of the budget."""
    return max(1, min(config["window"], budget // 2))


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """The squared change; the window itself stays."""
    return kept_if_newest(score.real, position, length, observation_window(config, budget))


def scores_of_tokens(config: Config, look: Look) -> list[float]:
    """The squared changes of the outputs of the last queries, summed over these and the query heads."""
    assert look.attention is not None
    losses, doubts = [0.0] * len(look.positions), [0.0] * len(look.positions)
    for matrix in look.attention:
        for row in matrix.tolist()[-observation_window(config, look.budget) :]:
            output = mixed(row, look.values)
            for j, (share, value) in enumerate(zip(row, look.values, strict=True)):
                distance, size = apart(value, output)
                losses[j] += (odds(share) * distance) ** 2
                doubts[j] += odds(share) ** 2 * distance * (distance / rest(share) + size)
                if not distance and share * size:
                    doubts[j] += SMALLEST
    look.report(margin(losses, [_relative(*pair) for pair in zip(losses, doubts, strict=True)]))
    return losses


def _relative(loss: float, doubt: float) -> float:
    """How many times more uncertain than usual a loss is; one that fp32 cannot hold is of no meaning."""
    if loss < SMALLEST:
        return math.inf if doubt else 1.0
    return 1 + doubt / loss
