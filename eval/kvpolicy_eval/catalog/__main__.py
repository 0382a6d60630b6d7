"""`python -m kvpolicy_eval.catalog`: bring every list of methods up to date, from the registry.

Run it in the root of the source tree after a method was added. It writes the public names, the API reference, the
navigation and the index of methods, draws pictures that are missing, and measures for pages whose table is empty.
Tables by the place of the question come from the results of the board.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvpolicy_eval.catalog.lists import places
from kvpolicy_eval.methods.plan import methods, page_of, paged

ROOT = Path()


def main(argv: list[str] | None = None) -> int:
    """Write what is out of date, or say it; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.catalog", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is out of date")
    parser.add_argument("--n", type=int, default=32, help="prompts per task for allocators and selectors")
    parser.add_argument("--n-codecs", type=int, default=8, help="prompts per task for codecs and readers")
    args = parser.parse_args(argv)
    try:
        stale = [place for place in places(ROOT) if not place.is_current(ROOT)]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    pictures = [name for name in methods() if not picture(name).is_file()]
    tables = [name for name in paged() if lacks_table(name, "measured")]
    by_place = [name for name in paged() if lacks_table(name, "places")]
    outdated = [
        *(f"{place.path}: {place.name}" for place in stale),
        *(f"{picture(name)} is missing" for name in pictures),
        *(f"{page(name)}: its table is empty" for name in tables),
        *(f"{page(name)}: its table by the place of the question is empty" for name in by_place),
    ]
    print(*outdated, sep="\n", end="\n" * bool(outdated))
    if args.check:
        return 1 if outdated else 0
    for place in stale:
        place.write(ROOT)
    if pictures:
        draw(pictures)
    if tables:
        measure(tables, args.n, args.n_codecs)
    if by_place:
        fill_by_place(by_place)
    return 0


def page(name: str) -> Path:
    """The page of a method."""
    return ROOT / "docs" / "methods" / f"{page_of(name)}.md"


def picture(name: str) -> Path:
    """The picture of a method."""
    return ROOT / "docs" / "pictures" / f"{name}.svg"


def lacks_table(name: str, place: str) -> bool:
    """Whether a place for a table on the page of a method is empty."""
    return f"<!-- table:{place} -->\n<!-- /table -->" in page(name).read_text(encoding="utf-8")


def draw(names: list[str]) -> None:
    """Draw the pictures of methods."""
    from kvpolicy_eval.pictures.__main__ import main as draw_pictures  # needs matplotlib

    draw_pictures([*names, "--out", str(ROOT / "docs" / "pictures")])


def measure(names: list[str], n: int, n_codecs: int) -> None:
    """Fill the tables on the pages of methods."""
    from kvpolicy_eval.methods.__main__ import main as measure_methods  # needs transformers

    folder = str(ROOT / "docs" / "methods")
    measure_methods([*names, "--n", str(n), "--n-codecs", str(n_codecs), "--fill", folder])


def fill_by_place(names: list[str]) -> None:
    """Fill the tables by the place of the question, as far as the board has results."""
    from kvpolicy_eval.board.cells import DOCS, SHARES, Board
    from kvpolicy_eval.board.places import fill_places
    from kvpolicy_eval.board.policies import entries

    board = Board(ROOT / "docs" / "assets" / "board.jsonl", DOCS, "tiny-4k")
    fill_places([page(name) for name in names], board, entries("tiny-4k"), sorted(SHARES, reverse=True))


if __name__ == "__main__":
    sys.exit(main())
