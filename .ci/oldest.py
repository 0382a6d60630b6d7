"""Print the oldest releases that pyproject.toml admits, as constraints for pip: `name==version`, one a line."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def oldest(project: dict[str, Any]) -> dict[str, str]:
    """The lowest admitted version of each requirement of a project table, by name.

    Raises:
        ValueError: A requirement has no lowest version, or two requirements of a name have different ones.
    """
    found: dict[str, str] = {}
    for requirement in itertools.chain(project["dependencies"], *project["optional-dependencies"].values()):
        read = re.fullmatch(r"([\w-]+)(?:\[[\w,-]+\])?(?:>=([\d.]+))?(?:;.*)?", requirement)
        if read is not None and read[1] == project["name"]:
            continue
        if read is None or read[2] is None or found.setdefault(read[1], read[2]) != read[2]:
            raise ValueError(f"a requirement must be NAME>=VERSION, the same in each extra, got {requirement!r}")
    return found


if __name__ == "__main__":
    for name, version in sorted(oldest(tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]).items()):
        print(f"{name}=={version}")
