"""Rows of the board, and the file of comma-separated values that the page's script filters and sorts."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvpolicy.text.formats import replacing
from kvpolicy_eval.board.cells import CHANCE, MARK, Board, Cell, accuracy, has_beyond
from kvpolicy_eval.board.policies import Entry
from kvpolicy_eval.common.intervals import Interval
from kvpolicy_lm_eval.data.modes import BEYOND, MODES

ANSWERS = (*MODES, "all", BEYOND)
"""Right answers by the place of the question."""
COSTS = ("held", "moved", "step")
"""Bytes held and moved, and the time of a step, each over the full cache's."""
COLUMNS = (
    *("policy", "kind", "tokens", "budget"),
    *(f"{name}{end}" for name in ANSWERS for end in ("", "_low", "_high")),
    *COSTS,
    "below",
)
"""Columns of the file."""


class Row(NamedTuple):
    """A policy at a budget and a length.

    Attributes:
        policy: Its spec at the budget, and how a prompt is held if not as keys and values.
        kind: Kind of the method that it shows.
        answers: Right answers, by `ANSWERS`; without what was not measured.
        costs: The most of any place of the question, by `COSTS`; without what was not measured.
        below: Names of the answers of which `random` with the same bytes has more that are right.
    """

    policy: str
    kind: str
    answers: dict[str, Interval]
    costs: dict[str, float]
    below: tuple[str, ...] = ()

    def shown(self, name: str) -> str:
        """Right answers with their interval, and the mark if `random` has more; empty if they were not measured."""
        return f"{self.answers[name]}{MARK if name in self.below else ''}" if name in self.answers else ""


def find_row(board: Board, entry: Entry, share: float, length: int) -> Row:
    """Known results of a policy at a budget and a length."""
    found = {mode: board.known_cell(Cell(entry, share, mode, length)) for mode in MODES}
    found[BEYOND] = board.known_cell(Cell(entry, share, BEYOND if has_beyond(entry) else "after", length))
    measured = [result for mode in MODES if (result := found[mode])]
    rights = {mode: accuracy([result] if result else []) for mode, result in found.items()}
    rights["all"] = accuracy(measured if len(measured) == len(MODES) else [])
    costs = {name: max((result[name] for result in measured if name in result), default=None) for name in COSTS[:2]}
    costs["step"] = (board.known_time(entry, share) or {}).get("ratio")
    answers = {name: right for name in ANSWERS if (right := rights[name]) is not None}
    return Row(
        entry.at(share) + entry.name.removeprefix(entry.spec),
        entry.kind,
        answers,
        {name: cost for name, cost in costs.items() if cost is not None},
        _below_chance(board, entry, share, length, answers),
    )


def _below_chance(
    board: Board, entry: Entry, share: float, length: int, answers: dict[str, Interval]
) -> tuple[str, ...]:
    """Names of the answers of which `random` has more that are right."""
    if not entry.by_bytes or entry.spec == CHANCE:
        return ()
    chance = find_row(board, Entry(CHANCE, "selector"), share, length).answers
    return tuple(name for name in answers if name in chance and answers[name].mean < chance[name].mean)


def write_rows(path: Path, board: Board, listed: Sequence[Entry], shares: Sequence[float]) -> None:
    """Write a line for each policy, length and budget of which anything has been measured.

    Args:
        path: File to write.
        board: Has the results.
        listed: The policies.
        shares: Budgets, as fractions of the full cache's bytes.
    """
    with replacing(path) as draft, draft.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for length in board.docs:
            for share in shares:
                found = [row for entry in listed if (row := find_row(board, entry, share, length)).answers]
                if any(row.policy != "full" for row in found):
                    writer.writerows(_line(row, share, length) for row in found)


def _line(row: Row, share: float, length: int) -> dict[str, str]:
    line = {"policy": row.policy, "kind": row.kind, "tokens": str(length), "budget": f"{share:g}"}
    for name, right in row.answers.items():
        ends = {"": right.mean, "_low": right.low, "_high": right.high}
        line |= {f"{name}{end}": f"{value:.4g}" for end, value in ends.items()}
    return line | {name: f"{cost:.4g}" for name, cost in row.costs.items()} | {"below": " ".join(row.below)}
