"""Pages that commands fill with tables, and what stands in them."""

from __future__ import annotations

from pathlib import Path


def page_with(file: Path, *places: str) -> Path:
    """A page with places for tables that are empty."""
    file.write_text("".join(f"<!-- table:{name} -->\n<!-- /table -->\n" for name in places), encoding="utf-8")
    return file


def text_at(page: Path, place: str) -> str:
    """What stands at a place of a page."""
    text = page.read_text(encoding="utf-8").partition(f"<!-- table:{place} -->\n")[2]
    return text.partition("\n<!-- /table -->")[0]


def cells(text: str) -> list[list[str]]:
    """The rows of all tables without their heads, and without the marks of code."""
    lines = text.splitlines()
    heads = [lines[at - 1] for at, line in enumerate(lines) if line.startswith("|---")]
    rows = [line for line in lines if line.startswith("| ") and line not in heads]
    return [[cell.strip(" `") for cell in row[2:-2].split(" | ")] for row in rows]


def first_lines(file: Path, count: int, folder: Path) -> Path:
    """A copy of the beginning of a file of results: others may have been added since a page was filled."""
    lines = file.read_text(encoding="utf-8").splitlines()
    assert 0 < count <= len(lines)
    copy = folder / f"{count}-{file.name}"
    copy.write_text("\n".join(lines[:count]), encoding="utf-8")
    return copy
