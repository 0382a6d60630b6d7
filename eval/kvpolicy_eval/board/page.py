"""The tables of the board."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvpolicy_eval.board.cells import Board, Cell, Result, accuracy, has_beyond
from kvpolicy_eval.board.policies import Entry
from kvpolicy_eval.common.markdown import table
from kvpolicy_eval.data.modes import BEYOND, MODES

COLUMNS = ["policy", "kind", *MODES, "all", BEYOND, "held", "moved", "step"]
SORTABLE = '<div class="sortable numbers" markdown>\n\n{}\n\n</div>'
"""A table that a click on a column sorts. A cell without a number is empty, so that it is last in every order."""


def tables(board: Board, listed: Sequence[Entry], shares: Sequence[float], lengths: Sequence[int]) -> str:
    """A table for each length and budget of which anything has been measured."""
    parts: list[str] = []
    for length in lengths:
        for share in shares:
            rows = [cells for entry in listed if any((cells := row(board, entry, share, length))[2:6])]
            if all(cells[0] == "`full`" for cells in rows):
                continue
            title = f"### {length:,} tokens, {share:.0%} of the bytes"
            parts += [title, SORTABLE.format(table(COLUMNS, rows)), _docs(board, length)]
    return "\n\n".join(parts)


def full_cache(board: Board, lengths: Sequence[int]) -> str:
    """Right answers of the full cache by task, length and place of the question: what the model itself can do."""
    full = Entry("full", "all tokens")
    found = {(length, mode): board.known_cell(Cell(full, 1.0, mode, length)) for length in lengths for mode in MODES}
    known = {place: result for place, result in found.items() if result is not None}
    tasks = list(dict.fromkeys(task for result in known.values() for task in result["right"]))
    rows = [
        [
            f"{length:,}",
            mode,
            *(f"{result['right'][task]} of {result['docs']}" if task in result["right"] else "" for task in tasks),
        ]
        for (length, mode), result in known.items()
    ]
    return table(["tokens", "question", *tasks], rows)


def row(board: Board, entry: Entry, share: float, length: int) -> list[str]:
    """The row of a policy: answers by the place of the question, bytes held and moved, and the time of a step."""
    found = [board.known_cell(Cell(entry, share, mode, length)) for mode in MODES]
    measured = [result for result in found if result is not None]
    beyond = board.known_cell(Cell(entry, share, BEYOND if has_beyond(entry) else "after", length))
    return [
        f"`{entry.at(share)}`" + entry.name.removeprefix(entry.spec),
        entry.kind,
        *(_answers([result] if result else []) for result in found),
        _answers(measured if len(measured) == len(MODES) else []),
        _answers([beyond] if beyond else []),
        *(_worst(measured, name) for name in ("held", "moved")),
        _time(board.known_time(entry, share)),
    ]


def _answers(results: list[Result]) -> str:
    """Right answers with their interval, if all are known."""
    return str(accuracy(results) or "")


def _worst(results: list[Result], name: str) -> str:
    """The most bytes of any place of the question, over the full cache's."""
    values = [result[name] for result in results if name in result]
    return f"{max(values):.2f}" if values else ""


def _time(result: Result | None) -> str:
    """Time of a step over that of the full cache."""
    return f"{result['ratio']:.2f}" if result and "ratio" in result else ""


def _docs(board: Board, length: int) -> str:
    docs = board.docs[length]
    return (
        f"{docs} prompts per task, so that `inside` and `after` are of {6 * docs} answers and `second` of {5 * docs}."
    )


def refusals(board: Board, listed: Sequence[Entry], shares: Sequence[float], lengths: Sequence[int]) -> str:
    """Every policy that was refused, with the lengths and budgets at which it was."""
    lines: dict[str, list[str]] = {}
    for entry, place, _ in _refused(board, listed, shares, lengths):
        lines.setdefault(entry.name, []).append(place)
    return "\n".join(f"- `{spec}`: {', '.join(dict.fromkeys(places))}" for spec, places in lines.items())


def peer_refusals(board: Board, listed: Sequence[Entry], shares: Sequence[float], lengths: Sequence[int]) -> str:
    """Every method of another library that was refused, with the lengths and budgets, and the first of the reasons."""
    places: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for entry, place, message in _refused(board, listed, shares, lengths):
        places.setdefault(entry.name, []).append(place)
        reasons.setdefault(entry.name, message)
    rows = [[f"`{spec}`", ", ".join(dict.fromkeys(places[spec])), why] for spec, why in reasons.items()]
    return table(["method", "without a result at", "why, at the first"], rows) if rows else ""


def _refused(
    board: Board, listed: Sequence[Entry], shares: Sequence[float], lengths: Sequence[int]
) -> Iterator[tuple[Entry, str, str]]:
    """Refused cells: the entry, the length and budget in words, and the message."""
    for entry in listed:
        for length in lengths:
            for share in shares:
                for mode in MODES:
                    result = board.known_cell(Cell(entry, share, mode, length))
                    if result and "refused" in result:
                        yield entry, f"{length:,} tokens at {share:.0%}", result["refused"]
