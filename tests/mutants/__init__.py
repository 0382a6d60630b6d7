"""Small defects that the tests must find, run by `python tests/mutations.py`.

One file for each room, one line of JSON for each defect, with the fields of `Mutation`. A person thought of them, or
read what `tests/draw_mutations.py` drew.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One defect, as a replacement of text in one file.

    Attributes:
        name: What the defect does, in a few words; unique.
        file: The file that is changed, relative to the root of the repository.
        old: Text that stands exactly once in the file.
        new: Text that replaces it.
        tests: Files or node ids of the tests that claim this behavior; together they take at most two minutes.
        equivalent: Why no test can find the defect, for a change that alters no result; empty for all others.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    def apply(self, source: str) -> str:
        """The source with the defect.

        Raises:
            ValueError: If `old` does not stand exactly once in the source.
        """
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has its text {source.count(self.old)} times, not once")
        return source.replace(self.old, self.new)


def all_mutations() -> list[Mutation]:
    """The mutations of all files here, by room."""
    rooms = (path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jsonl")))
    return [read(line) for room in rooms for line in room.splitlines()]


def read(line: str) -> Mutation:
    """A mutation from a line of JSON."""
    fields: dict[str, Any] = json.loads(line)
    fields["tests"] = tuple(fields["tests"])
    return Mutation(**fields)
