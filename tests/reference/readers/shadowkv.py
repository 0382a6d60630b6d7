"""Pages by the mean of their keys, and keys in the directions in which those of the prompt vary most."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from . import Held, Vector, product

DEFAULTS: dict[str, Any] = {"read": 256, "rank": "auto", "page": 8, "sinks": 4, "recent": 32, "rebuild": 256}
SMALL = "shadowkv:read=8:page=2:rank=3:sinks=1:recent=1:rebuild=5"
SWEEPS = 40


def page(config: dict[str, Any], slots: int) -> int:
    """Pages of one size."""
    return config["page"]


def estimate(config: dict[str, Any], keys: Sequence[Vector], query: Vector, channels: Sequence[int]) -> float:
    """The product with the landmark."""
    return product([math.fsum(numbers) / len(keys) for numbers in zip(*keys, strict=True)], query)


def singular_vectors(rows: Sequence[Vector]) -> list[list[float]]:
    """The right singular vectors of a matrix, those of the largest singular values first: one-sided Jacobi rotations.

    Pairs of columns are rotated until all columns are orthogonal; their lengths are the singular values then.
    """
    width = len(rows[0])
    columns = [[row[channel] for row in rows] for channel in range(width)]
    vectors = [[float(one == other) for other in range(width)] for one in range(width)]
    for _ in range(SWEEPS):
        for one in range(width):
            for other in range(one + 1, width):
                both = product(columns[one], columns[other])
                if abs(both) < 1e-300:
                    continue
                ratio = (product(columns[other], columns[other]) - product(columns[one], columns[one])) / (2 * both)
                tangent = math.copysign(1.0, ratio) / (abs(ratio) + math.hypot(1.0, ratio))
                cosine = 1 / math.hypot(1.0, tangent)
                for table in (columns, vectors):
                    first = table[one]
                    second = table[other]
                    pairs = list(zip(first, second, strict=True))
                    table[one] = [cosine * (a - tangent * b) for a, b in pairs]
                    table[other] = [cosine * (tangent * a + b) for a, b in pairs]
    order = sorted(range(width), key=lambda number: -product(columns[number], columns[number]))
    return [vectors[number] for number in order]


def fitted(config: dict[str, Any], parts: Sequence[Sequence[Held | None]]) -> list[Vector]:
    """The basis of the keys of a head, which have no rotary embedding here.

    Args:
        config: The parameters, and `rounded`, which rounds a vector to the dtype of the keys.
        parts: Its slots.
    """
    rounded: Callable[[Vector], Vector] = config["rounded"]
    keys = [held.key for part in parts for held in part if held]
    if not keys:
        return []
    rank = config["rank"] if config["rank"] != "auto" else max(1, len(keys[0]) // 2)
    return [rounded(vector) for vector in singular_vectors(keys)[:rank]]


def read_key(config: dict[str, Any], held: Held, length: int) -> Vector:
    """The key of a token as a step reads it."""
    if held.position >= length - config["recent"] or held.position < config["sinks"]:
        return held.key
    rebuilt = [0.0] * len(held.key)
    for vector in config["fitted"]:
        amount = product(held.key, vector)
        rebuilt = [number + amount * part for number, part in zip(rebuilt, vector, strict=True)]
    return rebuilt
