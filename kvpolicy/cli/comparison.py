"""The texts that several policies generate, side by side if the terminal is wide enough, with time and memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvpolicy.cli.formatting import counted, size, terms, width

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from kvpolicy.cli.generation import Generation

MIN_COLUMN = 48
"""The width below which texts are shown one below the other instead of side by side."""

EXCERPT = 24
"""The number of characters that are shown where two texts differ."""


def first_difference(first: Generation, other: Generation) -> int | None:
    """Return the number of tokens in the common prefix of two texts; None if the texts are identical."""
    if first.tokens == other.tokens:
        return None
    pairs = zip(first.tokens, other.tokens, strict=False)
    differing = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    return min(len(first.tokens), len(other.tokens)) if differing is None else differing


def facts(run: Generation, first: Generation | None = None) -> list[tuple[str, str]]:
    """Return the time and memory of a run as terms and values, and where its text differs from the first one."""
    pairs: list[tuple[str, str]] = []
    if run.interrupted:
        pairs.append(("stopped", f"by Ctrl-C after {counted(len(run.tokens), 'token')}"))
    pairs += [
        ("kept", f"{run.kept:,.0f} of {run.seen:,} tokens (mean over layers and KV heads)"),
        ("bytes", held(run.nbytes, run.full_nbytes)),
        ("prefill", _speed(run.prompt, run.prefill_rate)),
        ("decode", _speed(len(run.tokens), run.decode_rate)),
    ]
    if run.note:
        pairs.append(("note", run.note))
    if first is not None:
        pairs.append(("text", _describe_difference(first, run)))
    return pairs


def summary(run: Generation) -> str:
    """Format the facts of one run."""
    return terms([("policy", run.policy), *facts(run)])


def held(nbytes: int, full_nbytes: int) -> str:
    """Format the bytes of a cache in relation to the full cache.

    >>> held(2**19, 5 * 2**19), held(0, 0)
    ('512 KiB, 0.20 of the full cache (2.5 MiB)', '0 B')
    """
    if not full_nbytes:
        return size(nbytes)
    return f"{size(nbytes)}, {nbytes / full_nbytes:.2f} of the full cache ({size(full_nbytes)})"


def _speed(tokens: int, rate: float | None) -> str:
    return counted(tokens, "token") + ("" if rate is None else f", {rate:,.0f} tokens/s")


def _common_prefix(first: str, other: str) -> int:
    """Return the length of the common prefix of two strings.

    >>> _common_prefix("tiger", "tin"), _common_prefix("a", "a")
    (2, 1)
    """
    pairs = enumerate(zip(first, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(other)))


def _describe_difference(first: Generation, run: Generation) -> str:
    prefix = first_difference(first, run)
    if prefix is None:
        return "identical to the first"
    start = _common_prefix(first.text, run.text)
    ours = run.text[start : start + EXCERPT]
    theirs = first.text[start : start + EXCERPT]
    longest = max(len(first.tokens), len(run.tokens))
    return f"differs from the first after {prefix:,} of {longest:,} tokens: {ours!r} instead of {theirs!r}"


def show(runs: list[Generation]) -> None:
    """Print all texts and their facts. The part that differs from the first text is bold if the terminal allows it."""
    from rich.console import Console

    console = Console(file=sys.stdout, width=width(), highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        if width() < MIN_COLUMN * len(runs):
            for number, run in enumerate(runs):
                console.print(*([""] if number else []), *_blocks(run, runs[0]), sep="\n")
        else:
            console.print(_side_by_side(runs))
    print("\n".join(line.rstrip() for line in captured.get().rstrip().splitlines()))


def _side_by_side(runs: list[Generation]) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for _ in runs:
        table.add_column(ratio=1, overflow="fold")
    for row in zip(*(_blocks(run, runs[0]) for run in runs), strict=True):
        table.add_row(*row)
    return table


def _blocks(run: Generation, first: Generation) -> list[RenderableType]:
    """Return the policy, its text and its facts."""
    from rich.table import Table
    from rich.text import Text

    start = _common_prefix(first.text, run.text)
    text = Text(run.text.rstrip("\n") or "(empty)")
    if run is not first and start < len(run.text):
        text.stylize("bold", start)
    details = Table.grid(padding=(0, 2, 0, 0))
    details.add_column(no_wrap=True)
    details.add_column(overflow="fold")
    for term, value in facts(run, None if run is first else first):
        details.add_row(Text(term), Text(value))
    return [Text(run.policy, style="bold underline"), text, Text(""), details]
