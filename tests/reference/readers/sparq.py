"""Tokens with a large product in the largest channels of a query, and the mean value for the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from . import Held, Vector, log_sum

DEFAULTS: dict[str, Any] = {"read": 256, "channels": "auto", "correct": True}
SMALL = "sparq:read=6:channels=3"


def page(config: dict[str, Any], slots: int) -> int:
    """Single slots."""
    return 1


def step_channels(config: dict[str, Any], queries: Sequence[Vector]) -> list[int]:
    """The channels in which the query heads of a KV head are largest together."""
    dim = len(queries[0])
    count = max(dim // 4, 1) if config["channels"] == "auto" else config["channels"]
    total = [sum(abs(query[channel]) for query in queries) for channel in range(dim)]
    return sorted(range(dim), key=lambda channel: -total[channel])[:count]


def estimate(config: dict[str, Any], keys: Sequence[Vector], query: Vector, channels: Sequence[int]) -> float:
    """The product in these channels, over the root of their share of the query's absolute numbers."""
    share = sum(abs(query[channel]) for channel in channels) / sum(abs(number) for number in query)
    return sum(keys[0][channel] * query[channel] for channel in channels) / math.sqrt(share)


def rest(
    config: dict[str, Any],
    entries: Sequence[Sequence[Held]],
    scores: Sequence[float],
    is_read: Sequence[bool],
    normalizer: float,
) -> list[tuple[float, Vector]]:
    """The mean value of all tokens, with the weight of those that are not read."""
    if not config["correct"] or all(is_read):
        return []
    unread = log_sum([score for score, its in zip(scores, is_read, strict=True) if not its])
    read = log_sum([score for score, its in zip(scores, is_read, strict=True) if its])
    values = [held.value for entry in entries for held in entry]
    mean = [sum(numbers) / len(values) for numbers in zip(*values, strict=True)]
    return [(normalizer + unread - read, mean)]
