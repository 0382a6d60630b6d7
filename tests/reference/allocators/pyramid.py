"""A straight line from the first layer down to the last."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from ..coding import Config
from ..exact import Number, exact
from ._common import waterfill

SMALL = "pyramid:beta=4"


def pyramid_targets(total: int, layers: int, beta: Number = 20) -> list[Fraction]:
    """A straight line from the first layer down to the last."""
    average = Fraction(total, layers)
    least = average / exact(beta)
    most = 2 * average - least
    if layers == 1:
        return [average]
    return [most - i * (most - least) / (layers - 1) for i in range(layers)]


def pyramid(total: int, layers: int, floor: int, ceiling: int, beta: Number = 20) -> list[int]:
    """Whole budgets that fall from the first layer to the last."""
    return waterfill(pyramid_targets(total, layers, beta), total, floor, ceiling)


def budgets(
    config: Config, metrics: Sequence[float] | None, total: int, layers: int, floor: int, ceiling: int
) -> list[int]:
    """Whole budgets that fall from the first layer to the last."""
    return pyramid(total, layers, floor, ceiling, config["beta"])
