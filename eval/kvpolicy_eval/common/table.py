"""A table of the documentation: what it measures, the options of its command, and the pages that show it.

A room of tables has one command, `common.table_command`, and a module for each table:

    TABLE = Table(measure, places={"bits": ["docs/guide/codecs.md"]}, options=[prompts(8)])
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvpolicy_eval.common.markdown import table


class Grid(NamedTuple):
    """One Markdown table.

    Attributes:
        columns: Their names.
        rows: Cells of each row.
    """

    columns: Sequence[str]
    rows: Iterable[Sequence[object]]


class Section(NamedTuple):
    """The content of one place in a page.

    Attributes:
        place: Name of the place.
        grids: Its tables.
        note: How the numbers were measured, below the tables.
    """

    place: str
    grids: Sequence[Grid]
    note: str = ""

    def __str__(self) -> str:
        """As Markdown; rows that are measured one by one can be rendered once.

        >>> print(Section("bits", [Grid(["codec", "bits"], [["kivi", 2]])], "One layer."))
        | codec | bits |
        |---|---|
        | kivi | 2 |
        <BLANKLINE>
        One layer.
        """
        return "\n\n".join([*(table(*grid) for grid in self.grids), *filter(None, [self.note])])


def without_equal(grid: Grid) -> tuple[Grid, str]:
    """A table without the columns that are equal in all rows, and a sentence with these for its note.

    A table of one row stays as it is.

    >>> without_equal(Grid(["policy", "slots"], [["h2o", "8"], ["tova", "8"]]))
    (Grid(columns=['policy'], rows=[['h2o'], ['tova']]), 'All rows: slots 8. ')
    """
    rows = list(grid.rows)
    if len(rows) < 2:
        return Grid(grid.columns, rows), ""
    differ = [len(set(cells)) > 1 for cells in zip(*rows, strict=True)]
    columns = zip(grid.columns, rows[0], differ, strict=True)
    said = ", ".join(f"{name} {cell}" for name, cell, shown in columns if cell and not shown)
    differing = Grid([*compress(grid.columns, differ)], [[*compress(row, differ)] for row in rows])
    return differing, f"All rows: {said}. " if said else ""


class UsageError(Exception):
    """A table cannot be measured with these arguments or on this machine; the command says it without a traceback."""


class Option:
    """An argument of a table's command.

    Args:
        name: Such as `--codecs`; a name without dashes is a positional argument.
        **how: Arguments of `argparse.ArgumentParser.add_argument`.
    """

    def __init__(self, name: str, **how: Any) -> None:
        """Remember the arguments."""
        self.name = name
        self.how = how

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Add it to the parser of a command."""
        parser.add_argument(self.name, **self.how)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table, or several that one measurement fills.

    Attributes:
        measure: Measures the sections of the table; each is printed, and written to its pages, when it is yielded.
        places: Each place in pages that the table can fill, and the pages of the documentation that have it, relative
            to the root of the source tree.
        options: Arguments of its command.
        needs: What must be there to measure it.
    """

    measure: Callable[[argparse.Namespace], Iterable[Section]]
    places: Mapping[str, Sequence[str]]
    options: Sequence[Option] = ()
    needs: str = "nothing"


def collect(rows: Iterable[list[str]]) -> list[list[str]]:
    """All rows of a table; each is printed to stderr when it has been measured, because all of them take long."""
    measured: list[list[str]] = []
    for row in rows:
        print(" | ".join(row), file=sys.stderr, flush=True)
        measured.append(row)
    return measured


def torch_note() -> str:
    """Version of torch, vector instructions of the CPU and number of threads, for a note below a table."""
    vectors = torch.backends.cpu.get_cpu_capability()  # twice as many numbers at a time with AVX512 as with AVX2
    return f"torch {torch.__version__}, CPU ({vectors}), {torch.get_num_threads()} thread(s)"


def prompts(default: int) -> Option:
    """`--n`, the prompts of each task."""
    return Option("--n", type=int, default=default, help=f"prompts per task; {default} by default")


def byte_shares(default: Sequence[float]) -> Option:
    """`--shares`, budgets in bytes."""
    return Option("--shares", nargs="+", type=float, default=default, help="fractions of the full cache's bytes")


def results_folder(default: Path | None = None) -> Option:
    """`--cache`, a folder that keeps results."""
    return Option(
        "--cache", type=Path, default=default, help="folder for results, with which an interrupted run continues"
    )


def only(metavar: str, default: Sequence[str]) -> Option:
    """`--only`, specs to measure."""
    return Option("--only", nargs="+", default=default, metavar=metavar, help="specs to measure; all by default")


def parts(names: Sequence[str]) -> Option:
    """`parts`, the parts of a table to measure; empty for all."""

    def known(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(f"there is no part {name}; choose from {', '.join(names)}")
        return name

    # With `choices`, argparse refuses that nothing is given.
    return Option("parts", nargs="*", type=known, metavar="PART", help=f"{', '.join(names)}; all by default")


def rounds(default: int) -> Option:
    """`--rounds`, how often a time is measured."""
    return Option("--rounds", type=int, default=default, help=f"repetitions of each measurement; {default} by default")


def threads(default: int = 0) -> Option:
    """`--threads`, which the command applies before it measures."""
    return Option("--threads", type=int, default=default, help="threads of torch; torch's default if 0")
