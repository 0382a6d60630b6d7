"""Pages whose bounds allow a large product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import Vector

DEFAULTS: dict[str, Any] = {"read": 256, "page": "auto"}
SMALL = "quest:read=8:page=2:dense=0:resort=3"


def page(config: dict[str, Any], slots: int) -> int:
    """Short pages where few slots are held."""
    if config["page"] != "auto":
        return config["page"]
    return 4 if slots < 4096 else 16


def estimate(config: dict[str, Any], keys: Sequence[Vector], query: Vector, channels: Sequence[int]) -> float:
    """In each channel, the larger product of the query with the largest and the smallest key."""
    bound = 0.0
    for channel, number in enumerate(query):
        highest = max(key[channel] for key in keys)
        lowest = min(key[channel] for key in keys)
        bound += max(number * highest, number * lowest)
    return bound
