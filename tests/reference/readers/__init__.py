"""Which kept tokens a decode step reads: the slow version of each reader stands in the file of its name.

A file has `DEFAULTS`, the parameters that the reader has beside `read`, `dense` and `recent`; `page`, the slots of an
entry; and `estimate`, what an entry is worth to a query. `channels` is what a reader chooses from a prompt, if it does.
`SMALL` is a spec with numbers that fit tiny models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..versions import version

Vector = Sequence[float]


class Held(NamedTuple):
    """A token in a slot: its position, its key as attention sees it, and the logarithm of the tokens it stands for."""

    position: int
    key: Vector
    log_count: float = 0.0


def product(one: Vector, other: Vector) -> float:
    """The sum of the products of all channels."""
    return sum(a * b for a, b in zip(one, other, strict=True))


def count_of(read: float | int, slots: int, page: int) -> int:
    """How many slots are read of so many."""
    wanted = read if isinstance(read, int) else math.ceil(round(read * slots, 6))
    pages = max(math.ceil(wanted / page), 1)
    return min(pages * page, slots)


def chosen(
    name: str, config: dict[str, Any], parts: Sequence[Sequence[Held | None]], queries: Sequence[Vector], **more: Any
) -> set[int]:
    """The positions that one head reads of the slots that are divided into entries; see `ranked`."""
    return set(ranked(name, config, parts, queries, **more))


def ranked(
    name: str,
    config: dict[str, Any],
    parts: Sequence[Sequence[Held | None]],
    queries: Sequence[Vector],
    *,
    length: int,
    first: int,
    scale: float,
    group_size: int = 1,
    channels: Sequence[int] = (),
) -> list[int]:
    """The positions that one head reads of the slots that are divided into entries, the most needed entry first.

    Args:
        name: Of the reader.
        config: Its parameters.
        parts: The slots of each part, in order; None for an empty one.
        queries: Of the query heads of the KV head.
        length: Tokens that the row has seen.
        first: Position of the first token that the head keeps.
        scale: The factor of products.
        group_size: Of the codec.
        channels: What the reader chose from the prompt.
    """
    method = version("reader", name)
    full = {"recent": 1, **method.DEFAULTS, **config}
    slots = sum(len(part) for part in parts)
    page = method.page(full, slots)
    allowed = count_of(full["read"], slots, page)
    if allowed >= slots:
        return sorted((held.position for part in parts for held in part if held), reverse=True)
    if page > 1:
        page = math.ceil(page / group_size) * group_size
    entries: list[list[Held]] = []
    for part in parts:
        for start in range(0, len(part), page):
            entries.append([held for held in part[start : start + page] if held])
    entries = [entry for entry in entries if entry]
    if not entries:
        return []
    weight = [0.0] * len(entries)
    for query in queries:
        scores = [scale * method.estimate(full, [held.key for held in entry], query, channels) for entry in entries]
        scores = [score + max(held.log_count for held in entry) for score, entry in zip(scores, entries, strict=True)]
        top = max(scores)
        total = sum(math.exp(score - top) for score in scores)
        for number, score in enumerate(scores):
            weight[number] = max(weight[number], math.exp(score - top) / total)

    def place(number: int) -> tuple[int, float, int]:
        positions = [held.position for held in entries[number]]
        always = 0
        if max(positions) >= length - full["recent"]:
            always = 1
        if min(positions) == first:
            always = 2
        if max(positions) == length - 1:
            always = 3
        return -always, -weight[number] if not always else 0.0, min(positions)

    order = sorted(range(len(entries)), key=place)
    best = order[: math.ceil(allowed / page)]
    return [held.position for number in best for held in entries[number]]
