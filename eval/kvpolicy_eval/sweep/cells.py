"""Cells of a sweep, and the files of a sweep's folder.

A cell is done if its `results.json` exists. That file is moved into place in one step, after all others are written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpolicy.text.formats import check_format, stamp
from kvpolicy_eval.sweep.errors import describe

FORMAT = 1
"""Version of a sweep's files; a reader refuses a newer one."""

DONE = "results.json"
"""Results of a cell."""
FAILED = "error.json"
"""Error of a cell."""
NOTES = "sweep.json"
"""Settings, config and commands of the sweep."""

_REQUIRED = {
    DONE: ("cell", "scores", "seconds", "peak_bytes", "probe", "versions"),  # under the key kvpolicy_sweep
    FAILED: ("cell", "type", "error", "seconds"),
    NOTES: ("settings",),
}
"""Keys by which a file is recognized as one of a sweep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One model, one task, and one policy at one budget.

    Attributes:
        model: Name of the model in the config.
        task: Name of lm-eval's task.
        method: Spec of the policy without a budget.
        budget: The budget; empty if the policy has none.
    """

    model: str
    task: str
    method: str
    budget: str = ""

    @property
    def policy(self) -> str:
        """Spec of the policy."""
        return f"{self.method}@{self.budget}" if self.budget else self.method

    @property
    def folder(self) -> Path:
        """Folder of the cell's files, relative to the sweep's; readable, and different for different cells."""
        names = [_file_name(part) for part in (self.model, self.task, self.policy)]
        return Path("cells", *names)

    def __str__(self) -> str:
        """Name of the cell in a line of progress."""
        return f"{self.model} {self.policy} {self.task}"


class Store:
    """The files of a sweep.

    Args:
        folder: Of the sweep; it is created by the first file.
    """

    def __init__(self, folder: Path) -> None:
        """Store the folder."""
        self.folder = folder

    def state(self, cell: Cell) -> str:
        """Whether a cell is `done`, `failed` or `missing`; files that are not a sweep's are ignored.

        Raises:
            ValueError: If a newer kvpolicy wrote the file.
        """
        place = self.folder / cell.folder
        if _read(place / DONE):
            return "done"
        return "failed" if _read(place / FAILED) else "missing"

    def holds_results(self) -> bool:
        """Whether any cell is done."""
        return any(_read(path) for path in self._files(DONE))

    def finish(self, cell: Cell, results: dict[str, Any], samples: dict[str, str]) -> None:
        """Write the results of a cell; if the process is killed meanwhile, the cell is either done or missing.

        Args:
            cell: The cell.
            results: Results in lm-eval's format, with ours under `kvpolicy_sweep`.
            samples: JSON lines of each task.
        """
        place = self.folder / cell.folder
        for task, lines in samples.items():
            write(place / f"samples_{_file_name(task)}.jsonl", lines)
        write(place / DONE, json.dumps(results, indent=1, ensure_ascii=False))
        (place / FAILED).unlink(missing_ok=True)

    def fail(self, cell: Cell, error: BaseException, seconds: float) -> None:
        """Write the error of a cell."""
        kind, message = describe(error)
        content = stamp(FORMAT) | {"cell": asdict(cell), "type": kind, "error": message, "seconds": round(seconds, 3)}
        write(self.folder / cell.folder / FAILED, json.dumps(content, indent=1, ensure_ascii=False))

    def read(self, name: str) -> Iterator[dict[str, Any]]:
        """The files of one name in all cells, in the order of their paths.

        Args:
            name: `DONE` or `FAILED`.

        Raises:
            ValueError: If a file is not a sweep's, or a newer kvpolicy wrote it.
        """
        for path in self._files(name):
            yield load_json(path) | {"file": path.relative_to(self.folder).as_posix()}

    def _files(self, name: str) -> list[Path]:
        return sorted((self.folder / "cells").glob(f"*/*/*/{name}"))


def write(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the complete new file or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)  # it is left if `replace` failed, for example because the path is a folder


def load_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a sweep.

    Raises:
        ValueError: If it is not a sweep's file, or a newer kvpolicy wrote it.
    """
    content = _read(path)
    if content is None:
        raise ValueError(f"{path} must be a file of a sweep; delete it and rerun the sweep, or give another folder.")
    return content


def _read(path: Path) -> dict[str, Any] | None:
    """Content of a sweep's file; None if the file is missing or is not a sweep's."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    record = content.get("kvpolicy_sweep", content) if isinstance(content, dict) else None
    if not isinstance(record, dict):
        return None
    check_format(record, FORMAT, path)
    return content if all(name in record for name in _REQUIRED.get(path.name, ())) else None


def _file_name(name: str) -> str:
    """A readable file name; if characters had to be replaced, it ends in a digest of the whole name."""
    plain = re.sub(r"[^A-Za-z0-9_.+=@-]", "_", name)[:80].lstrip(".")
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
