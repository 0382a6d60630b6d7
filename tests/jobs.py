"""Which job of `.ci/run` runs a test, where its own markers do not say it.

`bash .ci/run` runs the tests of every commit. What compiles, draws, builds or starts processes takes half of the time
of all tests: it has the marker `heavy`, and `bash .ci/run slow` runs it. A few tests of each kind stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from importlib.util import find_spec

HEAVY: dict[str, tuple[str, ...]] = {}
"""Files whose tests are heavy, and the tests of each that stay, by the beginning of their names."""


def is_heavy(test: str) -> bool:
    """Whether a test, by its node ID, has the marker `heavy`."""
    file, _, name = test.partition("::")
    return any(fnmatchcase(file, files) and not name.startswith(kept or "::") for files, kept in HEAVY.items())


def missing(modules: Iterable[str]) -> str:
    """The modules that are not installed, in words; empty if all are."""
    return ", ".join(name for name in modules if find_spec(name) is None)
