"""The file of JSON lines that holds the results of earlier calls."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvpolicy.text.formats import check_format, stamp

Record = dict[str, Any]
"""Result of one case: the case, a status, and what was measured."""

FORMAT = 1
"""Version of a line; a reader refuses a newer one."""


def read_results(path: Path) -> list[Record]:
    """Results of earlier calls, without a line that was truncated when a call was killed.

    Raises:
        ValueError: If a newer kvpolicy wrote one of them, or it is another file, to which nothing should be appended.
    """
    records: list[Record] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        if line and not line.startswith("{"):
            raise ValueError(f"--results must be absent, or a file of results, got {path}; try another file.")
        try:
            record: Record = json.loads(line)
        except json.JSONDecodeError:
            continue
        check_format(record, FORMAT, path)
        records.append(record)
    return records


def append_result(path: Path, record: Record) -> None:
    """Append one line; a truncated line before it is ended first, so that only the truncated one is lost."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            truncated = file.read() != b"\n"
            file.write(b"\n" * truncated)
        file.write(json.dumps(record | stamp(FORMAT)).encode() + b"\n")


def case_key(case: Record) -> str:
    """Key under which the result of a case is found again."""
    return json.dumps(case, sort_keys=True)
