"""The tokens of largest attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import Vector, product

DEFAULTS: dict[str, Any] = {"read": 0.05}
SMALL = "exact:read=6"


def page(config: dict[str, Any], slots: int) -> int:
    """Single slots."""
    return 1


def estimate(config: dict[str, Any], keys: Sequence[Vector], query: Vector, channels: Sequence[int]) -> float:
    """The product itself."""
    return product(keys[0], query)
