"""Pages whose mean key has a large product with the query, and one slot for each of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from . import Held, Vector, product

DEFAULTS: dict[str, Any] = {"read": 256, "page": "auto", "estimate": True}
SMALL = "centroids:read=8:page=2:resort=3"


def page(config: dict[str, Any], slots: int) -> int:
    """Short pages where few slots are held."""
    if config["page"] != "auto":
        return config["page"]
    return 4 if slots < 4096 else 16


def mean(vectors: Sequence[Vector]) -> list[float]:
    """The mean of each channel."""
    return [math.fsum(numbers) / len(vectors) for numbers in zip(*vectors, strict=True)]


def estimate(config: dict[str, Any], keys: Sequence[Vector], query: Vector, channels: Sequence[int]) -> float:
    """The product with the mean key."""
    return product(mean(keys), query)


def rest(
    config: dict[str, Any],
    entries: Sequence[Sequence[Held]],
    scores: Sequence[float],
    is_read: Sequence[bool],
    normalizer: float,
) -> list[tuple[float, Vector]]:
    """Each page that is not read, with its mean value."""
    if not config["estimate"]:
        return []
    pages = zip(entries, scores, is_read, strict=True)
    return [(score, mean([held.value for held in entry])) for entry, score, its in pages if not its]
