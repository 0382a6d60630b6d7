"""Markdown tables, and the marked places in pages that the commands fill with them.

A place in a page is a pair of comments, with the table between them:

    <!-- table:NAME -->
    <!-- /table -->
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvpolicy.text.formats import replace_file


def row(cells: Iterable[object]) -> str:
    r"""One line of a table; bars are escaped and line breaks removed, because either would end the cell.

    >>> print(row(["a|b", 1]))
    | a\|b | 1 |
    """
    return "| " + " | ".join(" ".join(str(cell).splitlines()).replace("|", r"\|") for cell in cells) + " |"


def header(names: Sequence[str]) -> list[str]:
    """The first two lines of a table: column names and separator."""
    return [row(names), "|" + "---|" * len(names)]


def table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A whole table.

    >>> print(table(["a", "b"], [[1, 2]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    return "\n".join([*header(names), *map(row, rows)])


def pages_with(root: Path, name: str) -> list[Path]:
    """The README and the pages of a source tree that have a place for the table `name`, or the beginning of one."""
    found = [root / "README.md", *sorted(root.glob("docs/**/*.md"))]
    return [page for page in found if page.exists() and _begin(name) in page.read_text(encoding="utf-8")]


def has_place(page: Path, name: str) -> bool:
    """Whether a page has a place for the table `name`."""
    return _place(name).search(page.read_text(encoding="utf-8")) is not None


def check_places(pages: Iterable[Path], *names: str) -> None:
    """Check that pages have places for tables, so that a command can refuse before it measures or writes anything.

    Raises:
        ValueError: If a page has no place for one of them.
    """
    for page in pages:
        for name in names:
            if not has_place(page, name):
                raise ValueError(
                    f"{page} has no place for {name}; add the lines '{_begin(name)}' and '<!-- /table -->'."
                )


def fill(page: Path, name: str, text: str) -> None:
    """Replace the content of the place `name` in a page.

    Raises:
        ValueError: If the page has no such place.
    """
    check_places([page], name)
    content = page.read_text(encoding="utf-8")
    # A function as replacement: in a replacement string, backslashes of the table would be read as escapes.
    filled = _place(name).sub(lambda match: f"{match[1]}{text}\n{match[2]}", content)
    replace_file(page, filled.encode())


def add_fill_argument(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add `--fill` to a command that prints tables.

    Args:
        parser: Of the command.
        names: Of the places that the command fills.
    """
    tables = "table" if len(names) == 1 else "tables"
    text = f"page to write the {tables} to, between the comments 'table:NAME' and '/table'; NAME: {', '.join(names)}"
    parser.add_argument("--fill", type=Path, metavar="PAGE", help=text)


def publish(text: str, name: str, page: Path | None) -> None:
    """Print a table, and put it into the page of `--fill`.

    Raises:
        ValueError: If the page has no place for it.
    """
    print(text, flush=True)
    if page is not None:
        fill(page, name, text)


def _begin(name: str) -> str:
    return f"<!-- table:{name} -->"


def _place(name: str) -> re.Pattern[str]:
    return re.compile(rf"({re.escape(_begin(name))}\n).*?(<!-- /table -->)", re.DOTALL)
