"""Tokens with a large product in a few channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import Vector

DEFAULTS: dict[str, Any] = {"read": 256, "channels": "auto"}
SMALL = "labels:read=6:channels=3:dense=0"


def page(config: dict[str, Any], slots: int) -> int:
    """Single slots."""
    return 1


def channels(config: dict[str, Any], queries: Sequence[Sequence[Vector]], keys: Sequence[Vector]) -> list[int]:
    """The channels of the largest absolute product, over all pairs of a query and a key of a prompt.

    Args:
        config: The parameters.
        queries: Of each query head, of each token.
        keys: Of each token.
    """
    dim = len(keys[0])
    width = min(dim, 16) if config["channels"] == "auto" else config["channels"]
    total = [0.0] * dim
    for head in queries:
        for query in head:
            for key in keys:
                for channel in range(dim):
                    total[channel] += abs(query[channel] * key[channel])
    return sorted(sorted(range(dim), key=lambda channel: (-total[channel], channel))[:width])


def salience(windows: Sequence[tuple[Sequence[Sequence[Vector]], Sequence[Vector]]]) -> list[float]:
    """Of each channel of a KV head, the mean absolute query times the mean absolute key of a window.

    It is the mean over windows, each as often as it has tokens.

    Args:
        windows: Of each window, the queries of each query head and token, and the keys of each token.
    """
    dim = len(windows[0][1][0])
    every = sum(len(keys) for _, keys in windows)
    result = [0.0] * dim
    for queries, keys in windows:
        for channel in range(dim):
            numbers = [abs(query[channel]) for head in queries for query in head]
            of_keys = sum(abs(key[channel]) for key in keys) / len(keys)
            result[channel] += sum(numbers) / len(numbers) * of_keys * len(keys) / every
    return result


def estimate(config: dict[str, Any], keys: Sequence[Vector], query: Vector, channels: Sequence[int]) -> float:
    """The product in these channels."""
    return sum(keys[0][channel] * query[channel] for channel in channels)
