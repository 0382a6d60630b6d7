"""The file of JSON lines that holds the results of earlier calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvpolicy.text.formats import check_format, stamp
from kvpolicy.text.json_lines import append_line, read_lines

Record = dict[str, Any]
"""Result of one case: the case, a status, and what was measured."""

FORMAT = 1
"""Version of a line; a reader refuses a newer one."""


def read_results(path: Path) -> list[Record]:
    """Results of earlier calls, without a line that was truncated when a call was killed.

    Raises:
        ValueError: If a newer kvpolicy wrote one of them, or it is another file, to which nothing should be appended.
    """
    try:
        records: list[Record] = [{**record} for record in read_lines(path, '{"case": ')]
    except (ValueError, TypeError) as error:
        raise ValueError(f"--results must be absent, or a file of results, got {path}; try another file.") from error
    for record in records:
        check_format(record, FORMAT, path)
    return records


def append_result(path: Path, record: Record) -> None:
    """Append one line, in the place of one that was truncated."""
    append_line(path, record | stamp(FORMAT))


def case_key(case: Record) -> str:
    """Key under which the result of a case is found again."""
    return json.dumps(case, sort_keys=True)
