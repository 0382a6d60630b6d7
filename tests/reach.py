"""Which tests run the lines that a defect changes, from what coverage.py recorded of a run.

pip install pytest-cov
pytest --cov=kvpolicy --cov=integrations --cov=eval --cov-context=test --cov-report= tests kvpolicy
python tests/mutations.py --reach .coverage
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

from tests.mutants import Mutation


def changed_lines(source: str, mutation: Mutation) -> range:
    """The lines that a defect changes, from the start of the innermost statement that has the first of them."""
    old, new = mutation.old, mutation.new
    before = _common(old, new)
    behind = min(_common(old[::-1], new[::-1]), len(old) - before)
    start = source.index(old)
    first = source.count("\n", 0, start + before) + 1
    last = source.count("\n", 0, max(start + len(old) - behind - 1, start + before)) + 1
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    around = [node.lineno for node in statements if node.lineno <= first <= (node.end_lineno or node.lineno)]
    return range(max(around, default=first), last + 1)


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with together."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Reach:
    """The tests that run a line.

    Args:
        data: A file of coverage.py, with the ids of tests as contexts.
        root: The folder whose files it is about; by default, the folder of the data.
    """

    def __init__(self, data: Path, root: Path | None = None) -> None:
        """Read the data."""
        self._data = importlib.import_module("coverage").CoverageData(basename=str(data.absolute()))
        self._data.read()
        self._root = root or data.absolute().parent
        self._lines: dict[str, dict[int, list[str]]] = {}

    def tests(self, mutation: Mutation, source: str) -> set[str] | None:
        """Ids of the tests that run a changed line; None if it runs when its module is imported, or never."""
        if mutation.file not in self._lines:
            self._lines[mutation.file] = self._data.contexts_by_lineno(str(self._root / mutation.file))
        lines = self._lines[mutation.file]
        found = {context for line in changed_lines(source, mutation) for context in lines.get(line, ())}
        return None if "" in found or not found else {context.rpartition("|")[0] for context in found}
