"""Show what policies wrote, one beside the other where there is room, and what each took."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvpolicy.cli.printing import size, terms, width

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from kvpolicy.cli.writing import Written

COLUMN = 48
"""The narrowest column of text; where the columns would be narrower, texts stand one under the other."""
SHOWN = 24
"""Letters of a text that are shown where it parts."""


def parts_at(first: Written, other: Written) -> int | None:
    """How many tokens two texts begin with alike; None where they are the same."""
    if first.tokens == other.tokens:
        return None
    pairs = zip(first.tokens, other.tokens, strict=False)
    alike = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    return min(len(first.tokens), len(other.tokens)) if alike is None else alike


def facts(run: Written, first: Written | None = None) -> list[tuple[str, str]]:
    """What a run took, as words and their meaning; and where its text parts from the first one's."""
    share = f" ({run.nbytes / run.full_nbytes:.2f} of it)" if run.full_nbytes else ""
    pairs = [
        ("kept", f"{run.kept:,.0f} of {run.seen:,} tokens, the mean of layers and heads"),
        ("bytes", f"{size(run.nbytes)}; the full cache {size(run.full_nbytes)}{share}"),
        ("prefill", _speed(run.prompt, run.prefill_rate)),
        ("decode", _speed(len(run.tokens), run.decode_rate)),
    ]
    if run.note:
        pairs.append(("note", run.note))
    if run.interrupted:
        pairs.insert(0, ("stopped", f"by Ctrl-C after {len(run.tokens):,} token(s)"))
    return pairs if first is None else [*pairs, ("text", _parting(first, run))]


def summary(run: Written) -> str:
    """A run in a few lines, as wide as the terminal."""
    return terms([("policy", run.policy), *facts(run)])


def _speed(tokens: int, rate: float | None) -> str:
    return f"{tokens:,} token(s)" + ("" if rate is None else f", {rate:,.0f} tokens/s")


def _alike(first: str, other: str) -> int:
    """How many letters two texts begin with alike.

    >>> _alike("tiger", "tin"), _alike("a", "a")
    (2, 1)
    """
    pairs = enumerate(zip(first, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(other)))


def _parting(first: Written, run: Written) -> str:
    at = parts_at(first, run)
    if at is None:
        return "the same as the first"
    start = _alike(first.text, run.text)
    ours, theirs = (repr(text[start : start + SHOWN]) for text in (run.text, first.text))
    most = max(len(first.tokens), len(run.tokens))
    return f"parts from the first after {at:,} of {most:,} tokens: {ours}, where the first has {theirs}"


def show(runs: list[Written]) -> None:
    """Print all texts and what they took; the part that differs from the first is in bold, where bold can be seen."""
    from rich.console import Console

    console = Console(file=sys.stdout, width=width(), highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        if width() < COLUMN * len(runs):
            for number, run in enumerate(runs):
                console.print(*([""] if number else []), *_blocks(run, runs[0]), sep="\n")
        else:
            console.print(_columns(runs))
    print("\n".join(line.rstrip() for line in captured.get().rstrip().splitlines()))


def _columns(runs: list[Written]) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for _ in runs:
        table.add_column(ratio=1, overflow="fold")
    for row in zip(*(_blocks(run, runs[0]) for run in runs), strict=True):
        table.add_row(*row)
    return table


def _blocks(run: Written, first: Written) -> list[RenderableType]:
    """The policy, its text and what it took."""
    from rich.table import Table
    from rich.text import Text

    start = _alike(first.text, run.text)
    text = Text(run.text.rstrip("\n") or "(nothing)")
    if run is not first and start < len(run.text):
        text.stylize("bold", start)
    told = Table.grid(padding=(0, 2, 0, 0))
    told.add_column(no_wrap=True)
    told.add_column(overflow="fold")
    for word, meaning in facts(run, None if run is first else first):
        told.add_row(Text(word), Text(meaning))
    return [Text(run.policy, style="bold underline"), text, Text(""), told]
