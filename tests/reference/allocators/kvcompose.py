"""More for layers whose heads have more tokens that are worth keeping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..coding import Config
from ._common import waterfill

SMALL = "kvcompose"


def budgets(
    config: Config, metrics: Sequence[Any] | None, total: int, layers: int, floor: int, ceiling: int
) -> list[int]:
    """Whole budgets: how many composite tokens of each layer are among the best of all layers.

    `metrics` has what the tokens of each head of each layer are worth, or a number of each layer before any prompt.
    """
    assert metrics is not None
    if not isinstance(metrics[0], list):
        return waterfill([total * x / sum(metrics) for x in metrics], total, floor, ceiling)
    composite = [composites(heads) for heads in metrics]
    composite[0] = [max(worth) for worth in zip(*composite, strict=True)]
    return shared(composite, total, floor, ceiling)


def composites(heads: list[list[float]]) -> list[float]:
    """What the best tokens of all heads together are worth, then the second best, and so on."""
    ranked = zip(*(sorted(head, reverse=True) for head in heads), strict=True)
    return [sum(column) / len(column) for column in ranked]


def shared(curves: list[list[float]], total: int, floor: int, ceiling: int) -> list[int]:
    """Take the best tokens of all layers one by one, of equal ones those of the earlier layer, then heed the bounds."""
    every = sorted(((-worth, layer) for layer, curve in enumerate(curves) for worth in curve))
    taken = [layer for _, layer in every[:total]]
    counts = [taken.count(layer) for layer in range(len(curves))]
    return waterfill([total * count / len(taken) for count in counts], total, floor, ceiling)
