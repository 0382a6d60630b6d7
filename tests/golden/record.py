"""Records on disk, and what differs between two of them."""

from __future__ import annotations

import fnmatch
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from tests.golden.digests import Fields


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
    lines: dict[str, list[str]] = {}
    for case, field, recorded, found in wrong:
        numbers = isinstance(recorded, int) and isinstance(found, int)
        lines.setdefault(case, []).append(f"{field} ({recorded} -> {found})" if numbers else field)
    return [f"{case}: {', '.join(fields)}" for case, fields in lines.items()]
