"""Pages whose bounds allow a large product in the largest channels of a query."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from . import Vector

DEFAULTS: dict[str, Any] = {"read": 256, "page": "auto", "channels": "auto"}
SMALL = "rocket:read=8:page=2:channels=3:resort=3"


def reduction(config: dict[str, Any], slots: int) -> float:
    """How many times what a step may read, scores and tokens each a half, the slots are."""
    tokens = config["read"] if isinstance(config["read"], int) else config["read"] * slots
    return max(1.0, slots / (2 * tokens))


def page(config: dict[str, Any], slots: int) -> int:
    """The root of the reduction, which is divided evenly between tokens and channels."""
    if config["page"] != "auto":
        return config["page"]
    return min(int(reduction(config, slots)), math.ceil(math.sqrt(reduction(config, slots))))


def step_channels(config: dict[str, Any], queries: Sequence[Vector]) -> list[int]:
    """The channels in which the query heads of a KV head are largest together.

    A channel c counts with the largest number of a page's keys, and ~c with the smallest one.
    """
    dim = len(queries[0])
    count = config["channels"]
    if count == "auto":
        read = config["read"]
        # Scores of this many channels of all pages are half of what is read.
        share = 2 * read / config["entries"] if isinstance(read, int) else 2 * read * page(config, 1)
        count = max(1, min(dim, round(dim * share)))
    total = [sum(abs(query[channel]) for query in queries) for channel in range(dim)]
    largest = sorted(range(dim), key=lambda channel: -total[channel])[:count]
    return [channel if sum(query[channel] for query in queries) > 0 else ~channel for channel in largest]


def estimate(config: dict[str, Any], keys: Sequence[Vector], query: Vector, channels: Sequence[int]) -> float:
    """The product with these bounds, over the root of the channels' share of the query's absolute numbers."""
    bound = 0.0
    share = 0.0
    for signed in channels:
        channel = signed if signed >= 0 else ~signed
        numbers = [key[channel] for key in keys]
        bound += query[channel] * (max(numbers) if signed >= 0 else min(numbers))
        share += abs(query[channel])
    return bound / math.sqrt(share / sum(abs(number) for number in query))
