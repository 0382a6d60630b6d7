"""Records on disk, and what differs between two of them."""

from __future__ import annotations

import fnmatch
import json
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from tests.golden.digests import FAILED, REFUSED, Fields


class Difference(NamedTuple):
    """A field of a case that is not what was recorded; None stands for a field that is not there."""

    case: str
    field: str
    recorded: Any
    found: Any


def machine() -> dict[str, str]:
    """What hashes depend on besides the code."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    return {
        "cpu": model,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def write(path: Path, cases: dict[str, Fields]) -> None:
    """Write a record."""
    content = {"meta": machine(), "cases": cases}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> tuple[dict[str, str], dict[str, Fields]]:
    """The machine and the cases of a record."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return content["meta"], content["cases"]


def differences(recorded: dict[str, Fields], found: dict[str, Fields]) -> list[Difference]:
    """What differs in the cases that both have."""
    wrong: list[Difference] = []
    for case, fields in found.items():
        if case not in recorded:
            continue
        before = recorded[case]
        names = [*before, *(name for name in fields if name not in before)]
        pairs = [(name, before.get(name), fields.get(name)) for name in names]
        wrong += [Difference(case, name, old, new) for name, old, new in pairs if old != new]
    return wrong


def is_allowed(difference: Difference, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches "CASE FIELD"."""
    where = f"{difference.case} {difference.field}"
    return any(fnmatch.fnmatchcase(where, pattern) for pattern in patterns)


def describe(wrong: Sequence[Difference]) -> list[str]:
    """A line for each case, with its fields in the order in which they were recorded; numbers with their values."""
    by_case: dict[str, list[Difference]] = {}
    for one in wrong:
        by_case.setdefault(one.case, []).append(one)
    return [f"{case}: {_describe_case(some)}" for case, some in by_case.items()]


def summarize(wrong: Sequence[Difference]) -> str:
    """In how many cases each quantity differs, the most frequent first."""
    found = {(one.case, _quantity(one.field)) for one in wrong}
    counted = Counter(quantity for _, quantity in found)
    return ", ".join(f"{quantity} {count}" for quantity, count in counted.most_common())


def _describe_case(wrong: Sequence[Difference]) -> str:
    for name in (REFUSED, FAILED):
        for one in wrong:
            if one.field.endswith(name):
                return f"{one.field}, as it was not before" if one.recorded is None else f"no longer {one.field}"
    layers: dict[str, list[str]] = {}
    for one in wrong:
        name, layer = _layer(one.field)
        numbers = isinstance(one.recorded, int) and isinstance(one.found, int)
        part = f"{one.recorded} -> {one.found}" if numbers else layer
        layers.setdefault(name, []).extend([part] if part else [])
    return ", ".join(f"{name} ({' '.join(parts)})" if parts else name for name, parts in layers.items())


def _layer(field: str) -> tuple[str, str]:
    """A field's name and its layer, if it has one."""
    name, _, last = field.rpartition(".")
    return (name, last) if last.isdigit() else (field, "")


def _quantity(field: str) -> str:
    return _layer(field)[0].rpartition(".")[2]
