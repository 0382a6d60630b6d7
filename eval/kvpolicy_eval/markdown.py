"""Markdown tables, and the places in a page that a command fills."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; a bar or a line break in a cell does not end it.

    >>> print(table(["a", "b"], [[1, 2]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [head, ["---"] * len(head), *rows]
    text = "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)
    return text.replace("| --- ", "|---").replace("|--- |", "|---|").replace("--- |", "---|")


def _cell(cell: object) -> str:
    return " ".join(str(cell).splitlines()).replace("|", r"\|")


def fill(page: Path, name: str, text: str) -> None:
    """Put `text` between `<!-- table:name -->` and `<!-- /table -->` of a page.

    Raises:
        ValueError: Where the page has no such place.
    """
    content = page.read_text(encoding="utf-8")
    place = re.compile(rf"(<!-- table:{re.escape(name)} -->\n).*?(<!-- /table -->)", re.DOTALL)
    if not place.search(content):
        raise ValueError(f"{page} has no place for {name}: add '<!-- table:{name} -->' and '<!-- /table -->' lines.")
    page.write_text(place.sub(lambda match: f"{match[1]}{text}\n{match[2]}", content), encoding="utf-8")
