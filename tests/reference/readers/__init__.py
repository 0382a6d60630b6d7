"""Which kept tokens a decode step reads: the slow version of each reader stands in the file of its name.

A file has `DEFAULTS`, the parameters that the reader has beside `read`, `dense` and `recent`; `page`, the slots of an
entry; and `estimate`, what an entry is worth to a query. `channels` is what a reader chooses from a prompt, if it does.
A reader that chooses channels by the queries of each step has `step_channels`, whose parameters also have the number of
`entries`. One that estimates what it does not read has `rest`. One that finds clusters or a basis in what a head holds
has `fitted`, and gets the result as `fitted` of its parameters. One that rebuilds keys has `read_key`. `SMALL` is a
spec with numbers that fit tiny models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..versions import version

Vector = Sequence[float]


class Held(NamedTuple):
    """A token in a slot: position, key as attention sees it, logarithm of the tokens it stands for, and value."""

    position: int
    key: Vector
    log_count: float = 0.0
    value: Vector = ()


def product(one: Vector, other: Vector) -> float:
    """The sum of the products of all channels."""
    return sum(a * b for a, b in zip(one, other, strict=True))


def count_of(read: float | int, slots: int, page: int) -> int:
    """How many slots are read of so many."""
    wanted = read if isinstance(read, int) else math.ceil(round(read * slots, 6))
    pages = max(math.ceil(wanted / page), 1)
    return min(pages * page, slots)


def page_of(page: int, group_size: int) -> int:
    """Slots of an entry, of a codec whose slots share parameters."""
    return page if page == 1 else math.ceil(page / group_size) * group_size


def entries_of(parts: Sequence[Sequence[Held | None]], page: int) -> list[list[Held]]:
    """The tokens of each entry that has some."""
    entries: list[list[Held]] = []
    for part in parts:
        for start in range(0, len(part), page):
            entries.append([held for held in part[start : start + page] if held])
    return [entry for entry in entries if entry]


def log_sum(logs: Sequence[float]) -> float:
    """Logarithm of the sum of exponentials."""
    top = max(logs, default=-math.inf)
    return top if top == -math.inf else top + math.log(sum(math.exp(log - top) for log in logs))


def estimated(
    name: str,
    config: dict[str, Any],
    parts: Sequence[Sequence[Held | None]],
    queries: Sequence[Vector],
    read: set[int],
    *,
    scale: float,
    softcap: float | None = None,
    group_size: int = 1,
) -> list[list[tuple[float, Vector]]]:
    """For each query head, the scores and values of what stands for the entries that one head does not read.

    Args:
        name: Of the reader.
        config: Its parameters.
        parts: The slots of each part, in order; None for an empty one.
        queries: Of the query heads of the KV head.
        read: Positions of the tokens that are read of the parts.
        scale: The factor of products.
        softcap: The cap of scores, or None.
        group_size: Of the codec.
    """
    method = version("reader", name)
    if not hasattr(method, "rest"):
        return [[] for _ in queries]
    full = {**method.DEFAULTS, **config}
    entries = entries_of(parts, page_of(method.page(full, sum(len(part) for part in parts)), group_size))
    is_read = [entry[0].position in read for entry in entries]
    channels = method.step_channels(full, queries) if hasattr(method, "step_channels") else ()

    def finished(raw: float) -> float:
        return scale * raw if softcap is None else math.tanh(scale * raw / softcap) * softcap

    found: list[list[tuple[float, Vector]]] = []
    for query in queries:
        scores = [
            finished(method.estimate(full, [held.key for held in entry], query, channels))
            + log_sum([held.log_count for held in entry])
            for entry in entries
        ]
        exact = [
            finished(product(held.key, query)) + held.log_count
            for entry, its in zip(entries, is_read, strict=True)
            for held in entry
            if its
        ]
        found.append(method.rest(full, entries, scores, is_read, log_sum(exact)))
    return found


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
    page = page_of(page, group_size)
    entries = entries_of(parts, page)
    if not entries:
        return []
    full["entries"] = sum(math.ceil(len(part) / page) for part in parts)
    if hasattr(method, "step_channels"):
        channels = method.step_channels(full, queries)
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
        if max(positions) >= length - full["recent"] or min(positions) < full.get("sinks", 0):
            always = 1
        if min(positions) == first:
            always = 2
        if max(positions) == length - 1:
            always = 3
        return -always, -weight[number] if not always else 0.0, min(positions)

    order = sorted(range(len(entries)), key=place)
    best = order[: math.ceil(allowed / page)]
    return [held.position for number in best for held in entries[number]]
