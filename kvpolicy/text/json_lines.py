"""Files with one JSON value a line, to which a run appends its results and with which an interrupted run continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

_BLOCK = 2**16
"""Bytes that are read at once from the end of a file."""


def read_lines(path: Path, *starts: str) -> list[Any]:
    """The values of a file, without a last line that was cut off while it was written.

    Args:
        path: The file; it has no values if it does not exist.
        *starts: How lines may begin, by which one that was cut off is told from the text of another file.

    Raises:
        ValueError: If another line is no JSON, or the file is no text.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "results.jsonl"
        ...     append_line(path, {"key": "a"})
        ...     with path.open("a") as file:
        ...         _ = file.write('{"ke')
        ...     append_line(path, {"key": "b"})
        ...     read_lines(path, '{"key": ')
        [{'key': 'a'}, {'key': 'b'}]
    """
    if not path.exists():
        return []
    *whole, last = path.read_bytes().split(b"\n")
    is_whole = _is_json(last)
    if last and not is_whole and not any(start.encode().startswith(last[: len(start.encode())]) for start in starts):
        raise ValueError(f"{path} must have a JSON value in each line, got another last line; try another file.")
    try:
        return [json.loads(line) for line in (*whole, *([last] if is_whole else []))]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must have a JSON value in each line; try another file.") from error


def append_line(path: Path, value: Any) -> None:
    """Write a value to the end of a file, in the place of a last line that was cut off.

    Args:
        path: The file, which is made with its folder if it does not exist.
        value: What becomes a line.
    """
    line = json.dumps(value).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        last = _last_line(file)
        if last and not _is_json(last):
            file.truncate(file.seek(0, 2) - len(last))
        elif last:
            file.write(b"\n")
        file.write(line + b"\n")


def _last_line(file: BinaryIO) -> bytes:
    """What stands behind the last line break."""
    end = file.seek(0, 2)
    text = b""
    while end and b"\n" not in text:
        start = max(0, end - _BLOCK)
        file.seek(start)
        text = file.read(end - start) + text
        end = start
    return text[text.rfind(b"\n") + 1 :]


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
