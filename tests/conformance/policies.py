"""The words of every registered method, with numbers that fit tiny models; a new method is found by its name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kvpolicy import Policy
from kvpolicy.allocators.profile import save_profile
from kvpolicy.registry import lookup, names

_WORDS = {
    "streaming": "streaming:sinks=2",
    "snapkv": "snapkv:window=6:kernel=3",
    "kvcrush": "kvcrush/snapkv:window=6:kernel=3",
    "kivi": "kivi:group_size=4:residual_length=4",
    "pyramid": "pyramid:beta=4",
}

ALLOCATORS = [*names("allocator")]
SELECTORS = [name for name in names("selector") if name != "full"]
CODECS = [*names("codec")]
RANKED = [name for name in CODECS if lookup(name)[1]().traits.order == "worth"]
"""Codecs whose precision follows a ranking, which `full` has none of."""


def words(*methods: str, budget: str = "0.5") -> str:
    """The words of a policy of these methods, with small numbers."""
    return "+".join(_WORDS.get(method, method) for method in methods) + f"@{budget}"


def every(*lists: Sequence[str]) -> list[tuple[str, ...]]:
    """Rows in which every value of a list meets every value of every other list, by greedy choice."""
    used = Counter[tuple[int, str]]()
    missing = {
        (i, a, j, b) for i in range(len(lists)) for j in range(i + 1, len(lists)) for a in lists[i] for b in lists[j]
    }
    rows: list[tuple[str, ...]] = []
    while missing:
        i, a, j, b = min(missing, key=lambda pair: (used[pair[:2]] + used[pair[2:]], pair))
        row: dict[int, str] = {i: a, j: b}
        for place, values in enumerate(lists):
            if place not in row:
                gain = {value: len(missing & _pairs({**row, place: value})) for value in values}
                row[place] = max(values, key=lambda value: (gain[value], -used[place, value]))
        rows.append(tuple(row[place] for place in range(len(lists))))
        missing -= _pairs(row)
        used.update(row.items())
    return rows


def _pairs(row: dict[int, str]) -> set[tuple[int, str, int, str]]:
    return {(i, row[i], j, row[j]) for i in row for j in row if i < j}


def with_profile(policy: str, folder: Path, cosines: Sequence[float]) -> Policy:
    """`squeeze` with a profile of these cosines, in place of measuring."""
    path = folder / "profile.json"
    save_profile(path, "a test", cosines)
    assert json.loads(path.read_text())["layers"] == len(cosines)
    return Policy.parse(policy.replace("squeeze", f"squeeze:profile={path}"))
