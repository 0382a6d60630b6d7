"""Draw small defects from the source of a room, to be read by a person and added to tests/mutants.

    python tests/draw_mutations.py kvpolicy/cli --seed 1 --each 40 > tests/mutants/cli.jsonl

One defect for each so many lines of code. A defect is one change that people make by mistake: a comparison that takes
its bound, a number off by one, arguments swapped, a default changed, a refusal left out, an error swallowed, a key
misspelled, a call forgotten. Its tests are those of the file of the same name, or of the whole room.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}


class Change(NamedTuple):
    """A part of a source that a defect replaces.

    Attributes:
        what: The kind of the defect.
        start: Offset of the part.
        end: Offset behind it.
        new: What stands there instead.
    """

    what: str
    start: int
    end: int
    new: str


class Source:
    """A file and its syntax tree.

    Args:
        path: The file, relative to the root of the repository.
    """

    def __init__(self, path: Path) -> None:
        """Read and parse the file."""
        self.path = path
        self.text = (ROOT / path).read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self._lines = [0]
        for line in self.text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        """The offset of a place of the tree, whose columns count bytes."""
        start = self._lines[line - 1]
        before = self.text[start : self._lines[line]].encode("utf-8")[:column]
        return start + len(before.decode("utf-8"))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Offsets of a node."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def code_lines(self) -> int:
        """Lines that are neither blank nor comments."""
        return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in self.text.splitlines())

    def changes(self) -> Iterator[tuple[str, Change]]:
        """All defects of the file, with the name of the outermost function that they are in."""
        seen: set[Change] = set()
        for function in ast.walk(self.tree):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found = [*self._defaults(function)]
                found += [
                    change for statement in function.body for node in ast.walk(statement) for change in self._of(node)
                ]
                yield from ((function.name, change) for change in found if change not in seen)
                seen.update(found)

    def _of(self, node: ast.AST) -> Iterator[Change]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from self._comparison(node)
        elif isinstance(node, ast.Constant):
            yield from self._constant(node)
        elif isinstance(node, ast.BoolOp):
            first = self.span(node.values[0])[1]
            second = self.span(node.values[1])[0]
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from self._word("another connective", first, second, old, new)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            start, end = self.span(node)
            yield Change("a negation left out", start, end, self.text[slice(*self.span(node.operand))])
        elif isinstance(node, ast.Raise) and node.exc is not None:
            yield Change("an error is not raised", *self.span(node), "pass")
        elif isinstance(node, ast.ExceptHandler) and node.type is not None:
            yield Change("any error is caught", *self.span(node.type), "Exception")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield Change("a call is forgotten", *self.span(node), "pass")
        elif isinstance(node, ast.Call) and len(node.args) == 2 and not any(map(_is_starred, node.args)):
            first, second = (self.text[slice(*self.span(each))] for each in node.args)
            start = self.span(node.args[0])[0]
            end = self.span(node.args[1])[1]
            if first != second:
                yield Change("arguments are swapped", start, end, f"{second}, {first}")

    def _comparison(self, node: ast.Compare) -> Iterator[Change]:
        old, new = COMPARISONS[type(node.ops[0])]
        start = self.span(node.left)[1]
        end = self.span(node.comparators[0])[0]
        yield from self._word(f"{old} becomes {new}", start, end, old, new)

    def _word(self, what: str, start: int, end: int, old: str, new: str) -> Iterator[Change]:
        """The one `old` between two parts."""
        between = self.text[start:end]
        if between.count(old) == 1:
            at = start + between.index(old)
            yield Change(what, at, at + len(old), new)

    def _constant(self, node: ast.Constant) -> Iterator[Change]:
        value = node.value
        if isinstance(value, bool):
            yield Change("the other truth value", *self.span(node), str(not value))
        elif isinstance(value, int):
            yield Change("off by one", *self.span(node), str(value + 1))
        elif isinstance(value, str) and value.isidentifier():
            start, end = self.span(node)
            if self.text[start] in "\"'":
                yield Change("a key misspelled", start, end, f'"{value}_"')

    def _defaults(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Change]:
        given = [*function.args.defaults, *(each for each in function.args.kw_defaults if each is not None)]
        for node in given:
            if isinstance(node, ast.Constant):
                yield from (change._replace(what="another default") for change in self._constant(node))

    def replacement(self, change: Change) -> tuple[str, str] | None:
        """Whole lines around a change that stand once in the file, before and after it; None if it does not parse."""
        start = self.text.rfind("\n", 0, change.start) + 1
        end = self.text.find("\n", change.end)
        end = len(self.text) if end < 0 else end
        while self.text.count(self.text[start:end]) > 1 and start > 0:
            start = self.text.rfind("\n", 0, start - 1) + 1
        old = self.text[start:end]
        new = self.text[start : change.start] + change.new + self.text[change.end : end]
        try:
            ast.parse(self.text.replace(old, new))
        except SyntaxError:
            return None
        return (old, new) if self.text.count(old) == 1 and old != new else None


def _is_starred(node: ast.expr) -> bool:
    return isinstance(node, ast.Starred)


def tests_of(path: Path) -> list[str]:
    """The tests of a file: those of the same name in its room's folder, or the whole folder."""
    room = next((part for part in (path.parts[-2], *path.parts[::-1][2:]) if (ROOT / "tests" / part).is_dir()), "")
    if not room:
        room = path.parts[1].removeprefix("kvpolicy_")
    named = sorted((ROOT / "tests" / room).rglob(f"test_{path.stem.strip('_')}.py"))
    return [str(found.relative_to(ROOT)) for found in named] or [f"tests/{room}"]


def draw(folder: Path, seed: int, each: int) -> Iterator[dict[str, object]]:
    """Defects of all files of a room, one for each `each` lines of code of it, in the order of the files."""
    chance = random.Random(seed)
    sources = [Source(path.relative_to(ROOT)) for path in sorted((ROOT / folder).rglob("*.py"))]
    pool = [(source, name, change) for source in sources for name, change in source.changes()]
    wanted = round(sum(source.code_lines() for source in sources) / each)
    chosen: list[tuple[Source, str, Change, tuple[str, str]]] = []
    for source, name, change in chance.sample(pool, len(pool)):
        lines = source.replacement(change)
        if lines is not None and len(chosen) < wanted:
            chosen.append((source, name, change, lines))
    titles: Counter[str] = Counter()  # a line may have several defects of a kind
    for source, name, change, (old, new) in sorted(chosen, key=lambda one: (str(one[0].path), one[2].start)):
        line = source.text.count("\n", 0, change.start) + 1
        path = source.path.as_posix()
        title = f"{path}:{line}, {name}: {change.what}"
        titles[title] += 1
        title += f", {titles[title]}" * (titles[title] > 1)
        yield {"name": title, "file": path, "old": old, "new": new, "tests": tests_of(source.path)}


def main() -> None:
    """Parse the command line, and print the defects as lines of JSON."""
    parser = argparse.ArgumentParser(description="Draw small defects from the source of a room.")
    parser.add_argument("folder", type=Path, help="the room, relative to the root, such as kvpolicy/cli")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--each", type=int, default=40, help="lines of code for each defect")
    given = parser.parse_args()
    for mutation in draw(given.folder, given.seed, given.each):
        print(json.dumps(mutation, ensure_ascii=False))


if __name__ == "__main__":
    main()
