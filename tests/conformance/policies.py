"""The words of every registered method, with numbers that fit tiny models; a new method is found by its name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kvpolicy import Policy
from kvpolicy.allocators.profile import save_profile
from kvpolicy.registry import lookup, names
from tests.conformance.calibration import folder

_WORDS = {
    "streaming": "streaming:sinks=2",
    "snapkv": "snapkv:window=6:kernel=3",
    "kvcrush": "kvcrush/snapkv:window=6:kernel=3",
    "probe": "probe:recent=0.2:random=0.2",
    "pyramid": "pyramid:beta=4",
    "kivi": "kivi:group_size=4:residual_length=4",
    "tokenwise": "tokenwise:group_size=4:residual_length=4:block_size=4",
    "bfp": "bfp:block_channels=4:residual_length=3:block_size=4",
    "gear": "gear:bits=4:group_size=4:rank=0:residual_length=4",
    "kvquant": f"kvquant:outliers=0.1:sinks=2:residual_length=2:block_size=3:calibration={folder('kvquant')}",
    "rotate": "rotate:group_size=4:sinks=2:residual_length=2:block_size=4",
    "turboquant": "turboquant:residual_length=2:block_size=4",
    "staircase": "staircase:tokens_8bit=4:tokens_4bit=4:group_size=4:residual_length=2",
    "csr": f"csr:nnz=4:prompt_atoms=2:residual_length=1:block_size=4:dictionary={folder('csr')}",
    "mikv": "mikv:high=0.3:high_bits=8:residual_length=2:block_size=3",
    "zipcache": "zipcache:recode_every=5",
}
"""GEAR's basis is anyone's, so that only without one it can be compared number by number."""

ALLOCATORS = [*names("allocator")]
SELECTORS = [name for name in names("selector") if name != "full"]
CODECS = [*names("codec")]
RANKED = [name for name in CODECS if lookup(name)[1]().traits.demote_by == "priority"]
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


def every_pair() -> list[str]:
    """Policies in which every allocator, selector and codec meets every other once."""
    rows = every(ALLOCATORS, [*SELECTORS, "full"], CODECS)
    rows = [row for row in rows if not (row[1] == "full" and row[2] in RANKED)]
    return [words(*row, budget="1.0" if row[1] == "full" else "0.5") for row in rows]


def _pairs(row: dict[int, str]) -> set[tuple[int, str, int, str]]:
    return {(i, row[i], j, row[j]) for i in row for j in row if i < j}


def with_profile(policy: str, folder: Path, cosines: Sequence[float]) -> Policy:
    """`squeeze` with a profile of these cosines, in place of measuring."""
    path = folder / "profile.json"
    save_profile(path, "a test", cosines)
    assert json.loads(path.read_text())["layers"] == len(cosines)
    return Policy.parse(policy.replace("squeeze", f"squeeze:profile={path}"))
