"""Tables of answers by the place of the question, on the pages of methods and on others, from results of the board."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from kvpolicy import registry
from kvpolicy_eval.board.cells import MARK, MARKED, Board, Cell, accuracy, has_beyond, is_below_chance
from kvpolicy_eval.board.policies import SELECTOR, Entry
from kvpolicy_eval.common.codecs import selector_for
from kvpolicy_eval.common.intervals import interval
from kvpolicy_eval.common.markdown import fill, table
from kvpolicy_lm_eval.data.modes import BEYOND, MODES, Mode

PLACE = "places"
"""Name of the place for the table in a page."""

BASELINES = ["window", SELECTOR]
"""Selectors that a selector is compared with; other methods are compared with their selector."""

OVERVIEW = (
    *("full", "window", "streaming", "h2o", "snapkv", "tova", "kvzip", "kvcrush", "squeeze+snapkv"),
    *("uniform/adakv+snapkv", "snapkv+tokenwise:bits=4"),
    *("squeeze+kvcrush/snapkv", "uniform/adakv+kvzip"),
    *("uniform/adakv+kvzip+tokenwise:bits=4", "squeeze+kvcrush/snapkv+tokenwise:bits=4"),
)
"""Policies of the pages that are not about one method."""
OVERVIEW_LENGTH = 512
OVERVIEW_SHARE = 0.1
LENGTHS = (1024, 512)
"""Prompt lengths of the pages of methods; the first one at which every policy has enough results is shown."""
PLACES: tuple[Mode, ...] = ("inside", "after")
"""Places of the question on the pages of methods."""
LEAST_SHARE = 0.05
"""Smallest budget on the pages of methods."""


def fill_places(found: Sequence[Path], board: Board, listed: Sequence[Entry], shares: Sequence[float]) -> None:
    """Fill pages that have a place for the table."""
    for page in found:
        fill(page, PLACE, page_table(page.stem, board, listed, shares))


def page_table(name: str, board: Board, listed: Sequence[Entry], shares: Sequence[float]) -> str:
    """The table of a page: of a method, if it is named after one, or of the overview.

    The comment at its end has the number of results that it was made from. Since results are only ever appended to
    their file, the table can be made again after others were added.
    """
    if any(name in names for names in registry.BUILT_IN.values()):
        text = method_table(board, compared(name, listed), [share for share in shares if share >= LEAST_SHARE])
    else:
        text = overview_table(board, [entry for entry in listed if entry.name in OVERVIEW])
    marked = f" {MARKED}" if MARK in text else ""
    return f"{text}{marked}\n\n<!-- {len(board.known)} results -->"


def compared(name: str, listed: Sequence[Entry]) -> list[Entry]:
    """The policies of the board that show a method, after those that it is compared with.

    >>> from kvpolicy_eval.board.policies import entries
    >>> [entry.spec for entry in compared("kivi", entries())]
    ['snapkv', 'snapkv+kivi:bits=2']
    >>> [entry.spec for entry in compared("tova", entries())]
    ['window', 'snapkv', 'tova']
    """
    kind = registry.described(registry.lookup(name)[0])
    usual = selector_for(name, SELECTOR) if kind == "codec" else SELECTOR
    others = BASELINES if kind == "selector" else [usual]
    kinds = (kind, "all tokens")  # the entry of the selector `full`
    own = [entry for entry in listed if entry.kind in kinds and name in re.split("[+/:]", entry.spec)]
    return [entry for entry in listed if entry.spec in others and entry not in own] + own


def method_table(board: Board, found: Sequence[Entry], shares: Sequence[float]) -> str:
    """A row for each policy that was measured: answers at one length, by the place of the question and by budget."""
    length = shown_length(board, found, shares)
    rows: list[list[str]] = []
    for entry in found:
        answers = [_answers(board, Cell(entry, share, mode, length)) for mode in PLACES for share in shares]
        if any(answers):
            rows.append([f"`{entry.spec}`", *answers])
    names = [f"{mode}, {share:.0%}" for mode in PLACES for share in shares]
    empty = " Empty: not measured, or refused." if any("" in row for row in rows) else ""
    what = f"[`{board.model}`](../model-card.md): right answers by [place of the question](../board.md) and bytes"
    return f"{table(['policy', *names], rows)}\n\n{what}; {_prompts(board, length)}.{empty}"


def shown_length(board: Board, found: Sequence[Entry], shares: Sequence[float]) -> int:
    """The first of `LENGTHS` at which every policy has at least half of its results, else the one with most of them."""

    def known(entry: Entry, length: int) -> int:
        cells = (Cell(entry, share, mode, length) for mode in PLACES for share in shares)
        return sum(_answers(board, cell) != "" for cell in cells)

    lengths = [length for length in LENGTHS if length in board.docs]
    for length in lengths:
        if all(2 * known(entry, length) >= len(PLACES) * len(shares) for entry in found):
            return length
    return max(lengths, key=lambda length: sum(known(entry, length) for entry in found))


def overview_table(board: Board, found: Sequence[Entry]) -> str:
    """A row for each policy that was measured: answers at one length and budget, by the place of the question."""
    rows: list[list[str]] = []
    for entry in found:
        modes = [*MODES, BEYOND if has_beyond(entry) else "after"]
        answers = [_answers(board, Cell(entry, OVERVIEW_SHARE, mode, OVERVIEW_LENGTH)) for mode in modes]
        if any(answers):
            budget = "100%" if entry.kind == "all tokens" else f"{OVERVIEW_SHARE:.0%}"
            rows.append([f"`{entry.spec}`", budget, *answers])
    names = [f"{OVERVIEW_LENGTH:,} tokens", "budget", *MODES, BEYOND]
    return f"{table(names, rows)}\n\n{note(board)}"


def _answers(board: Board, cell: Cell) -> str:
    result = board.known_cell(cell)
    right = accuracy([result] if result else [])
    return f"{right.mean:.2f}{MARK if is_below_chance(board, cell) else ''}" if right else ""


def note(board: Board) -> str:
    """Meaning of the numbers of the overview, and how far off they may be."""
    prompts = _prompts(board, OVERVIEW_LENGTH)
    budget = "budget: fraction of the bytes of the full cache"
    return f"`{board.model}`, {prompts}; {budget}. Empty: not measured, or refused."


def _prompts(board: Board, length: int) -> str:
    docs = board.docs[length]
    widest = interval(5 * docs // 2, 5 * docs)  # `second` has five tasks
    return f"prompts of {length:,} tokens, ±{(widest.high - widest.low) / 2:.2f} (95 %)"
