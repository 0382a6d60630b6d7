"""Tokens without any of which the outputs of the last queries would change most."""

from __future__ import annotations

from ..coding import Config
from ._common import kept_if_newest, margin, pool
from ._look import Look
from ._outputs import mixed

DEFAULTS: Config = {"window": 32, "kernel": 1}
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
    losses = [0.0] * len(look.positions)
    for matrix in look.attention:
        for row in matrix.tolist()[-observation_window(config, look.budget) :]:
            output = mixed(row, look.values)
            for j in range(len(row)):
                losses[j] += change(row, look.values, j, output)
    # Squares of differences, in which fp32 weights are off by a few times their precision.
    losses = pool(losses, config["kernel"], "avg")
    look.report(margin(losses, [10.0] * len(losses)))
    return losses


def change(row: list[float], values: list[list[float]], j: int, output: list[float]) -> float:
    """The square by which an output changes if all but one token are attended to, as much as before in proportion."""
    rest = sum(share for i, share in enumerate(row) if i != j) + max(1 - sum(row), 0.0)  # with what learned sinks take
    if rest < 1e-5:  # nothing to speak of is left: the whole output
        return sum(x * x for x in values[j])
    others = [0.0 if i == j else share / rest for i, share in enumerate(row)]
    without = mixed(others, values)
    size = sum(x * x for x in values[j]) + sum(x * x for x in without)
    apart = sum((x - y) ** 2 for x, y in zip(values[j], without, strict=True))
    if apart < 1e-10 * size:  # equal but for rounding
        return 0.0
    return sum((x - y) ** 2 for x, y in zip(output, without, strict=True))
