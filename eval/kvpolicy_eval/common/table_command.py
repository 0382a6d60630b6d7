"""The command of a room of tables: `python -m ROOM NAME [options] [--fill [PAGE ...]]`, and `--list`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import torch

from kvpolicy import KVPolicyError
from kvpolicy_eval.common.markdown import check_places, fill, has_place
from kvpolicy_eval.common.table import Table, UsageError


def run(room: str, names: Sequence[str], argv: Sequence[str] | None = None) -> None:
    """Print a table of a room, and fill pages with it on request.

    Args:
        room: Package of the tables, such as `kvpolicy_eval.tables`.
        names: Its modules that have a `TABLE`.
        argv: Arguments after the program's name; those of the process by default.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = next((argument for argument in arguments if argument in names), None)
    parser = _parser(room, names, name)
    args = parser.parse_args(arguments)
    if args.list:
        print("\n".join(_listed(room, names)))
        return
    if name is None:
        parser.error(f"a table is required: {', '.join(names)}")
    if getattr(args, "threads", 0):
        torch.set_num_threads(args.threads)
    try:
        publish(_load(room, name), args)
    except (UsageError, KVPolicyError) as error:
        parser.error(str(error))


def publish(table: Table, args: argparse.Namespace) -> None:
    """Measure a table, print its sections, and write them to the pages of `--fill`, which are checked before.

    Raises:
        UsageError: If a page has none of the places of the table, or a section has no place in the pages.
    """
    try:
        pages = _pages(table, args)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    for number, section in enumerate(table.measure(args)):
        text = str(section)
        print("\n" * bool(number) + text, flush=True)
        if args.fill is not None and not pages.get(section.place):
            raise UsageError(f"--fill must name a page with a place for {section.place}, got none.")
        for page in pages.get(section.place, []):
            fill(page, section.place, text)


def _pages(table: Table, args: argparse.Namespace) -> dict[str, list[Path]]:
    """Pages to fill at each place: those of `--fill` that have it, or those of the documentation if it names none.

    Raises:
        OSError: If a page cannot be read.
        ValueError: If a page has no place, or there is no page.
    """
    if args.fill is None:
        return {}
    if args.fill:
        for page in args.fill:
            if not any(has_place(page, place) for place in table.places):
                raise ValueError(f"{page} must have a place for {' or '.join(table.places)}, got none.")
        return {place: [page for page in args.fill if has_place(page, place)] for place in table.places}
    pages = {place: [Path(page) for page in found] for place, found in table.places.items()}
    if not any(pages.values()):
        raise ValueError("--fill must name a page, because no page of the documentation has the table, got none.")
    for place, found in pages.items():
        check_places(found, place)
    return pages


def _parser(room: str, names: Sequence[str], name: str | None) -> argparse.ArgumentParser:
    """The parser of all tables, with the options of the table `name`, whose module alone is imported."""
    parser = argparse.ArgumentParser(prog=f"python -m {room}", description=import_module(room).__doc__)
    parser.add_argument("--list", action="store_true", help="list the tables, what they need, and their pages")
    tables = parser.add_subparsers(title="tables", dest="table", metavar="NAME", help=", ".join(names))
    for each in names:
        if each != name:
            tables.add_parser(each)
            continue
        table = _load(room, each)
        selected = tables.add_parser(each, description=import_module(f"{room}.{each}").__doc__)
        for option in table.options:
            option.add(selected)
        selected.add_argument("--fill", type=Path, nargs="*", metavar="PAGE", help=_fill_help(table))
    return parser


def _fill_help(table: Table) -> str:
    pages = ", ".join(_all_pages(table))
    without = f"; without a page: {pages}" if pages else ""
    return f"pages to write to, between the comments 'table:{' or '.join(table.places)}' and '/table'{without}"


def _all_pages(table: Table) -> list[str]:
    return list(dict.fromkeys(page for pages in table.places.values() for page in pages))


def _load(room: str, name: str) -> Table:
    return import_module(f"{room}.{name}").TABLE


def _listed(room: str, names: Sequence[str]) -> Iterator[str]:
    """A line for each table."""
    for name in names:
        table = _load(room, name)
        title, _, _ = (import_module(f"{room}.{name}").__doc__ or "").partition("\n")
        pages = ", ".join(_all_pages(table)) or "no page"
        yield f"{name}: {title} Needs {table.needs}; {pages}."
