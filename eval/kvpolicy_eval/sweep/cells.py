"""Cells of a sweep, and the files in which each one is kept.

A cell is finished when its `results.json` is there, which is put in place in one step, after all else was written.
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

from kvpolicy.spec.formats import check_format, stamp
from kvpolicy_eval.sweep.command import NOTES

FORMAT = 1
"""Version of a sweep's files; a reader refuses a newer one."""

DONE = "results.json"
FAILED = "error.json"
_NEEDED = {
    DONE: ("cell", "scores", "seconds", "peak_bytes", "probe", "versions"),  # under kvpolicy_sweep
    FAILED: ("cell", "type", "error", "seconds"),
    NOTES: ("settings",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One model, one task, one policy at one budget.

    Attributes:
        model: Its name in the config.
        task: Of lm-eval.
        method: The policy's words without a budget.
        budget: Its words, nothing where the policy has none.
    """

    model: str
    task: str
    method: str
    budget: str = ""

    @property
    def policy(self) -> str:
        """The whole policy's words."""
        return f"{self.method}@{self.budget}" if self.budget else self.method

    @property
    def folder(self) -> Path:
        """Where its files are, below the sweep's folder: readable, and different for different cells."""
        names = [_readable(part) for part in (self.model, self.task, self.policy)]
        return Path("cells", *names)

    def __str__(self) -> str:
        """What a line of progress calls it."""
        return f"{self.model} {self.policy} {self.task}"


class SharedError(RuntimeError):
    """What one of several processes met, raised in all of them.

    Args:
        kind: Name of the error's type.
        text: What it said.
    """

    def __init__(self, kind: str, text: str) -> None:
        """Keep both."""
        super().__init__(text)
        self.kind = kind


class Store:
    """The files of a sweep.

    Args:
        folder: Of the sweep; made when something is written.
    """

    def __init__(self, folder: Path) -> None:
        """Look at a folder."""
        self.folder = folder

    def state(self, cell: Cell) -> str:
        """Say whether a cell is `done`, `failed` or `missing`; a file that no sweep wrote does not count.

        Raises:
            ValueError: Where a newer kvpolicy wrote it.
        """
        place = self.folder / cell.folder
        return "done" if _read(place / DONE) else "failed" if _read(place / FAILED) else "missing"

    def holds_results(self) -> bool:
        """Whether any cell is done."""
        return any(_read(path) for path in self._files(DONE))

    def finish(self, cell: Cell, results: dict[str, Any], samples: dict[str, str]) -> None:
        """Write a cell's results; a kill at any moment leaves it either finished or missing.

        Args:
            cell: Which.
            results: In lm-eval's format, and ours under `kvpolicy_sweep`.
            samples: JSON lines of each task.
        """
        place = self.folder / cell.folder
        for task, lines in samples.items():
            write(place / f"samples_{_readable(task)}.jsonl", lines)
        write(place / DONE, json.dumps(results, indent=1, ensure_ascii=False))
        (place / FAILED).unlink(missing_ok=True)

    def fail(self, cell: Cell, error: BaseException, seconds: float) -> None:
        """Write why a cell failed."""
        kind, said = told(error)
        content = stamp(FORMAT) | {"cell": asdict(cell), "type": kind, "error": said, "seconds": round(seconds, 3)}
        write(self.folder / cell.folder / FAILED, json.dumps(content, indent=1, ensure_ascii=False))

    def read(self, name: str) -> Iterator[dict[str, Any]]:
        """Every cell's file of one name, in the order of the paths.

        Raises:
            ValueError: Where no sweep wrote a file, or a newer kvpolicy did.
        """
        for path in self._files(name):
            yield load_json(path) | {"file": path.relative_to(self.folder).as_posix()}

    def _files(self, name: str) -> list[Path]:
        return sorted((self.folder / "cells").glob(f"*/*/*/{name}"))


def told(error: BaseException) -> tuple[str, str]:
    """An error's type and its words, on one line."""
    kind = error.kind if isinstance(error, SharedError) else type(error).__name__
    return kind, " ".join(str(error).split()) or kind


def write(path: Path, text: str) -> None:
    """Write a file in one step: it is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)  # such as where the path is a folder


def load_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a sweep.

    Raises:
        ValueError: Where no sweep wrote it, or a newer kvpolicy did.
    """
    content = _read(path)
    if content is None:
        raise ValueError(f"{path} is no file of a sweep: delete it and run the sweep again, or give another folder.")
    return content


def _read(path: Path) -> dict[str, Any] | None:
    """What a sweep wrote; None where nothing is there, or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    own = content.get("kvpolicy_sweep", content) if isinstance(content, dict) else None
    if not isinstance(own, dict):
        return None
    check_format(own, FORMAT, path)
    return content if all(name in own for name in _NEEDED.get(path.name, ())) else None


def _readable(name: str) -> str:
    """A file name that says what it stands for; where letters had to go, it ends in a digest of all of them."""
    plain = re.sub(r"[^A-Za-z0-9_.+=@-]", "_", name)[:80].lstrip(".")
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
