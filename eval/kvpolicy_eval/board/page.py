"""The tables of the board."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from kvpolicy_eval.board.cells import MARK, MARKED, Board, Cell, accuracy, is_below_chance
from kvpolicy_eval.board.policies import Entry, within_bytes
from kvpolicy_eval.board.rows import ANSWERS, COSTS, find_row
from kvpolicy_eval.common.markdown import table
from kvpolicy_lm_eval.data.modes import MODES, Mode

COLUMNS = ["policy", "kind", *ANSWERS, *COSTS]
SORTABLE = '<div class="sortable numbers" markdown>\n\n{}\n\n</div>'
"""A table that a click on a column sorts. A cell without a number is empty, so that it is last in every order."""

TOP = 5
"""Policies of a budget in the table of the best ones."""
TOP_LENGTH = 1024
TOP_MODES: tuple[Mode, ...] = ("inside", "after")


def tables(board: Board, listed: Sequence[Entry], shares: Sequence[float], lengths: Sequence[int]) -> str:
    """A table for each length and budget of which anything has been measured."""
    parts: list[str] = []
    for length in lengths:
        for share in shares:
            rows = [cells for entry in listed if any((cells := row(board, entry, share, length))[2:6])]
            if all(cells[0] == "`full`" for cells in rows):
                continue
            title = f"### {length:,} tokens, {share:.0%} of the bytes"
            marked = f" {MARKED}" if any(MARK in cell for cells in rows for cell in cells) else ""
            parts += [title, SORTABLE.format(table(COLUMNS, rows)), _docs(board, length) + marked]
    return "\n\n".join(parts)


def top(board: Board, listed: Sequence[Entry], shares: Sequence[float]) -> str:
    """The best policies of each budget by right answers, with the question inside the prompt and after it.

    Readers, which hold everything, have no place in it. The comment at its end has the number of results.
    """
    length = TOP_LENGTH if TOP_LENGTH in board.docs else next(iter(board.docs))
    compared = within_bytes(listed)
    rows: list[list[str]] = []
    for share in shares:
        columns = [_best(board, [Cell(entry, share, mode, length) for entry in compared]) for mode in TOP_MODES]
        rows += [[f"{share:.0%}", *cells] for cells in zip_longest(*columns, fillvalue="")]
    found = table([f"{length:,} tokens", *(f"question {mode}" for mode in TOP_MODES)], rows)
    marked = f"\n\n{MARKED}" if MARK in found else ""
    return f"{found}{marked}\n\n<!-- {len(board.known)} results -->"


def _best(board: Board, cells: Sequence[Cell]) -> list[str]:
    """The policies of the cells with most right answers, and these; equal ones stay in their order."""
    known = {cell: right for cell in cells if (right := accuracy([board.known_cell(cell) or {}]))}
    best = sorted(known, key=lambda cell: known[cell].mean, reverse=True)[:TOP]
    marks = [MARK if is_below_chance(board, cell) else "" for cell in best]
    return [f"`{cell.entry.at(cell.share)}` {known[cell]}{mark}" for cell, mark in zip(best, marks, strict=True)]


def full_cache(board: Board, lengths: Sequence[int]) -> str:
    """Right answers of the full cache by length and place of the question: what the model itself can do."""
    full = Entry("full", "all tokens")

    def cell(length: int, mode: Mode) -> str:
        found = board.known_cell(Cell(full, 1.0, mode, length))
        return f"{sum(found['right'].values())}/{found['docs'] * len(found['right'])}" if found else ""

    rows = [[f"{length:,}", *(cell(length, mode) for mode in MODES)] for length in lengths]
    return table(["tokens", *(f"question {mode}" for mode in MODES)], [row for row in rows if any(row[1:])])


def row(board: Board, entry: Entry, share: float, length: int) -> list[str]:
    """The row of a policy: answers by the place of the question, bytes held and moved, and the time of a step."""
    found = find_row(board, entry, share, length)
    return [
        f"`{entry.at(share)}`" + entry.name.removeprefix(entry.spec),
        entry.kind,
        *(found.shown(name) for name in ANSWERS),
        *(f"{found.costs[name]:.2f}" if name in found.costs else "" for name in COSTS),
    ]


def _docs(board: Board, length: int) -> str:
    docs = board.docs[length]
    return (
        f"{docs} prompts per task, so that `inside` and `after` are of {6 * docs} answers and `second` of {5 * docs}."
    )


def refusals(board: Board, listed: Sequence[Entry], shares: Sequence[float], lengths: Sequence[int]) -> str:
    """Every policy that was refused, with the lengths and budgets at which it was."""
    refused = _refused(board, listed, shares, lengths)
    return "\n".join(f"- `{name}`: {_in_words(found)}" for name, (found, _) in refused.items())


def peer_refusals(board: Board, listed: Sequence[Entry], shares: Sequence[float], lengths: Sequence[int]) -> str:
    """Methods of other libraries that were refused, with the lengths and budgets, and the first of the reasons.

    Methods that share all of these are one row.
    """
    rows: dict[tuple[str, str], list[str]] = {}
    for name, (places, why) in _refused(board, listed, shares, lengths).items():
        rows.setdefault((_in_words(places), why), []).append(f"`{name}`")
    found = [[", ".join(specs), where, why] for (where, why), specs in rows.items()]
    return table(["method", "without a result at", "why, at the first"], found) if found else ""


_Places = dict[int, dict[float, None]]
"""Budgets by length, in order."""


def _in_words(places: _Places) -> str:
    """Lengths and budgets.

    >>> _in_words({512: {0.05: None, 0.02: None}, 1024: {0.02: None}})
    '512 tokens at 5%, 2%; 1,024 tokens at 2%'
    """
    return "; ".join(
        f"{length:,} tokens at {', '.join(f'{share:.0%}' for share in shares)}" for length, shares in places.items()
    )


def _refused(
    board: Board, listed: Sequence[Entry], shares: Sequence[float], lengths: Sequence[int]
) -> dict[str, tuple[_Places, str]]:
    """Entries that were refused, by name: the lengths and budgets at which they were, and the first message."""
    found: dict[str, tuple[_Places, str]] = {}
    for entry in listed:
        for length in lengths:
            for share in shares:
                for mode in MODES:
                    result = board.known_cell(Cell(entry, share, mode, length))
                    if result and "refused" in result:
                        places, _ = found.setdefault(entry.name, ({}, result["refused"]))
                        places.setdefault(length, {})[share] = None
    return found
