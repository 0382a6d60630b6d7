"""The same for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from ..coding import Config
from ._common import waterfill


def budgets(
    config: Config, metrics: Sequence[float] | None, total: int, layers: int, floor: int, ceiling: int
) -> list[int]:
    """Whole budgets, even."""
    return waterfill([Fraction(total, layers)] * layers, total, floor, ceiling)
