"""Small defects that the tests must find: one module for each room, run by `python tests/mutations.py`."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass


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
    """The mutations of all modules here, by room."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [mutation for name in names for mutation in importlib.import_module(f"{__name__}.{name}").MUTATIONS]
