"""Tables of answers by the place of the question, on the pages of methods and on others, from results of the board."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from kvpolicy import registry
from kvpolicy_eval.board.cells import Board, Cell, accuracy, has_beyond
from kvpolicy_eval.board.policies import SELECTOR, Entry
from kvpolicy_eval.common.codecs import selector_for
from kvpolicy_eval.common.intervals import interval
from kvpolicy_eval.common.markdown import fill, table
from kvpolicy_eval.data.modes import BEYOND, MODES

PLACE = "places"
"""Name of the place for the table in a page."""

BASELINES = {"selector": ["window", SELECTOR], "reader": ["full+exact:read={read}"]}
"""What a method is compared with, beside the full cache, by its kind; others are compared with their selector."""

OVERVIEW = (
    *("full", "window", "streaming", "h2o", "snapkv", "tova", "kvzip", "kvcrush", "squeeze+snapkv"),
    *("uniform/adakv+snapkv", "snapkv+tokenwise:bits=4"),
    *("squeeze+kvcrush/snapkv", "uniform/adakv+kvzip"),
    *("uniform/adakv+kvzip+tokenwise:bits=4", "squeeze+kvcrush/snapkv+tokenwise:bits=4"),
)
"""Policies of the pages that are not about one method."""
OVERVIEW_LENGTH = 512
OVERVIEW_SHARE = 0.1


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
        found, lengths = compared(name, listed), list(board.docs)
    else:
        found, lengths = [entry for entry in listed if entry.name in OVERVIEW], [OVERVIEW_LENGTH]
        shares = [OVERVIEW_SHARE]
    parts = [length_table(board, found, shares, length) for length in lengths]
    shown = [length for length, part in zip(lengths, parts, strict=True) if part]
    return "\n\n".join([*filter(None, parts), note(board, shown, found), f"<!-- {len(board.known)} results -->"])


def compared(name: str, listed: Sequence[Entry]) -> list[Entry]:
    """The policies of the board that show a method, after the full cache and what it is compared with.

    >>> from kvpolicy_eval.board.policies import entries
    >>> [entry.spec for entry in compared("kivi", entries())]
    ['full', 'snapkv', 'snapkv+kivi:bits=2']
    >>> [entry.spec for entry in compared("reuse", entries())]
    ['full', 'full+exact:read={read}', 'full+reuse/quest:read={read}']
    """
    kind = registry.described(registry.lookup(name)[0])
    usual = selector_for(name, SELECTOR) if kind == "codec" else SELECTOR
    others = ["full", *BASELINES.get(kind, [usual])]
    own = [entry for entry in listed if entry.kind == kind and name in re.split("[+/:]", entry.spec)]
    return [entry for entry in listed if entry.spec in others and entry not in own] + own


def length_table(board: Board, found: Sequence[Entry], shares: Sequence[float], length: int) -> str:
    """The rows of one length, policy by policy; empty if nothing has been measured."""
    rows: list[list[str]] = []
    for entry in found:
        for share in shares[:1] if entry.kind == "all tokens" else shares:
            modes = [*MODES, BEYOND if has_beyond(entry) else "after"]
            answers = [_answers(board, Cell(entry, share, mode, length)) for mode in modes]
            if any(answers):
                spec = entry.spec.replace(":read={read}", "")
                budget = "100%" if entry.kind == "all tokens" else f"{share:.0%}"
                rows.append([f"`{spec}`", budget, *answers])
    return table([f"{length:,} tokens", "budget", *MODES, BEYOND], rows) if rows else ""


def _answers(board: Board, cell: Cell) -> str:
    result = board.known_cell(cell)
    right = accuracy([result] if result else [])
    return f"{right.mean:.2f}" if right else ""


def note(board: Board, lengths: Sequence[int], found: Sequence[Entry]) -> str:
    """What the budget is, how many prompts the numbers are of, and how far off they may be."""
    reads = any(entry.kind == "reader" for entry in found)
    budget = "slots that a step reads" if reads else "full cache's bytes that are held"
    texts: list[str] = []
    for length in lengths:
        docs = board.docs[length]
        widest = interval(5 * docs // 2, 5 * docs)  # `second` has five tasks
        texts.append(f"{docs} of about {length:,} tokens (±{(widest.high - widest.low) / 2:.2f})")
    return (
        f"Right answers of `{board.model}`. The budget is the fraction of the {budget}. Prompts per task, and half the "
        f"width of the widest Wilson interval of 95 %: {', '.join(texts)}. What is missing was not measured yet, or "
        "does not fit into the budget."
    )
