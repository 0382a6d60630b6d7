"""Whether the order of policies is the same for longer prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from scipy.stats import spearmanr

from kvpolicy_eval.board.cells import Board, Cell, accuracy
from kvpolicy_eval.board.policies import Entry
from kvpolicy_eval.common.markdown import table
from kvpolicy_lm_eval.data.modes import BEYOND, MODES

PLACES = (*MODES, BEYOND)
LEAST = 20
"""Policies from which on a correlation is shown."""


def order(board: Board, listed: Sequence[Entry], shares: Sequence[float]) -> str:
    """Rank correlations of right answers between one prompt length and the next, by budget and place of the question.

    Each is over the policies that were measured with both lengths, whose number is in brackets.
    """
    rows: list[list[str]] = []
    for short, long in pairwise(sorted(board.docs)):
        for share in shares:
            found = [_cell(board, listed, share, mode, short, long) for mode in PLACES]
            if any(found):
                rows.append([f"{short:,} and {long:,}", f"{share:.0%}", *found])
    return table(["tokens", "budget", *(f"question {mode}" for mode in PLACES)], rows) if rows else ""


def _cell(board: Board, listed: Sequence[Entry], share: float, mode: str, short: int, long: int) -> str:
    pairs: list[tuple[float, float]] = []
    for entry in listed:
        one, other = (accuracy([board.known_cell(Cell(entry, share, mode, length)) or {}]) for length in (short, long))
        if one and other:
            pairs.append((one.mean, other.mean))
    if len(pairs) < LEAST:
        return ""
    correlation, _ = spearmanr(pairs)
    return f"{correlation:.2f} ({len(pairs)})"
