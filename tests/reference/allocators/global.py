"""As much for each layer as it has of the best tokens of all layers and heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..coding import Config
from ._common import waterfill
from .kvcompose import shared

SMALL = "global"


def budgets(
    config: Config, metrics: Sequence[Any] | None, total: int, layers: int, floor: int, ceiling: int
) -> list[int]:
    """Whole budgets. `metrics` has what the tokens of each head of each layer are worth, or a number of each layer."""
    assert metrics is not None
    if not isinstance(metrics[0], list):
        return waterfill([total * x / sum(metrics) for x in metrics], total, floor, ceiling)
    return shared([per_head(heads) for heads in metrics], total, floor, ceiling)


def per_head(heads: list[list[float]]) -> list[float]:
    """All tokens of a layer in order, as many at a time as there are heads: the middle one of each such group."""
    ranked = sorted((worth for head in heads for worth in head), reverse=True)
    return [ranked[start + (len(heads) - 1) // 2] for start in range(0, len(ranked), len(heads))]
