"""Tokens of the clusters whose center has a large product with the query, and one slot for what is not read of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import Held, Vector, log_sum, product

DEFAULTS: dict[str, Any] = {"read": 256, "cluster": "auto", "estimate": True, "sinks": 4, "rebuild": 1024}
SMALL = "retrieval:recent=1:read=6:cluster=3:sinks=2:rebuild=5"
SEGMENT = 8192
ROUNDS = 10
TIE = 1e-5


class Cluster(NamedTuple):
    """A cluster: its direction, the mean product of its keys with it, and the mean of its values."""

    direction: Vector
    length: float
    value: Vector


def page(config: dict[str, Any], slots: int) -> int:
    """Single slots."""
    return 1


def unit(vector: Vector) -> list[float]:
    """The vector with length 1; zeros stay zeros."""
    length = math.sqrt(product(vector, vector))
    return [number / length for number in vector] if length else list(vector)


def mean(vectors: Sequence[Vector]) -> list[float]:
    """The mean of each channel."""
    return [math.fsum(numbers) / len(vectors) for numbers in zip(*vectors, strict=True)]


def belongs(key: Vector, directions: Sequence[Vector]) -> int:
    """The first of the directions with the largest product, or nearly so; 0 without directions."""
    products = [product(key, direction) for direction in directions]
    best = max(products, default=0.0)
    return next((n for n, number in enumerate(products) if number >= best - TIE * abs(best)), 0)


def k_means(keys: Sequence[Vector], count: int) -> list[Vector]:
    """Directions of clusters, from evenly spaced keys on."""
    directions: list[Vector] = [unit(keys[(2 * n + 1) * len(keys) // (2 * count)]) for n in range(count)]
    for _ in range(ROUNDS):
        where = [belongs(key, directions) for key in keys]
        for number in range(count):
            own = [key for key, its in zip(keys, where, strict=True) if its == number]
            if own:
                directions[number] = unit(mean(own))
    return directions


def fitted(config: dict[str, Any], parts: Sequence[Sequence[Held | None]]) -> list[Cluster]:
    """The clusters of the tokens of a head.

    Args:
        config: The parameters, and `rounded`, which rounds a vector to the dtype of the keys.
        parts: Its slots.
    """
    rounded: Callable[[Vector], Vector] = config["rounded"]
    held = sorted((token for part in parts for token in part if token), key=lambda token: token.position)
    held = [token._replace(key=rounded(token.key), value=rounded(token.value)) for token in held]
    held = [token for token in held if token.position >= config["sinks"]]
    size = config["cluster"]
    if size == "auto":
        size = 4 if len(held) < 4096 else 16
    directions: list[Vector] = []
    for start in range(0, len(held), SEGMENT):
        segment = [token.key for token in held[start : start + SEGMENT]]
        directions += k_means(segment, math.ceil(len(segment) / size))
    directions = [rounded(direction) for direction in directions]
    where = [belongs(token.key, directions) for token in held]
    found: list[Cluster] = []
    for number, direction in enumerate(directions):
        own = [token for token, its in zip(held, where, strict=True) if its == number]
        center = mean([token.key for token in own]) if own else [0.0] * len(direction)
        value = mean([token.value for token in own]) if own else [0.0] * len(direction)
        found.append(Cluster(direction, product(center, direction), rounded(value)))
    return found


def cluster_of(config: dict[str, Any], key: Vector) -> int:
    """The cluster of a key."""
    return belongs(config["rounded"](key), [cluster.direction for cluster in config["fitted"]])


def estimate(config: dict[str, Any], keys: Sequence[Vector], query: Vector, channels: Sequence[int]) -> float:
    """The product with the center of the key's cluster."""
    if not config["fitted"]:
        return 0.0
    cluster = config["fitted"][cluster_of(config, keys[0])]
    return cluster.length * product(cluster.direction, query)


def rest(
    config: dict[str, Any],
    entries: Sequence[Sequence[Held]],
    scores: Sequence[float],
    is_read: Sequence[bool],
    normalizer: float,
) -> list[tuple[float, Vector]]:
    """Each cluster with tokens that are not read, with its mean value."""
    if not config["estimate"]:
        return []
    left: dict[int, list[float]] = {}
    for entry, score, its in zip(entries, scores, is_read, strict=True):
        if not its:
            left.setdefault(cluster_of(config, entry[0].key), []).append(score)
    return [(log_sum(logs), config["fitted"][number].value) for number, logs in left.items()]
