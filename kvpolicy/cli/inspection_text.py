"""What was seen of a prompt, in a terminal: colours where there are some, marks under the text where there are none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvpolicy.cli.inspection import Inspection, Layer
from kvpolicy.cli.printing import paragraph, size, width
from kvpolicy.reporting.text_rendering import NAMES, SHADES, Piece, cells, ink, level, share_of, wrapped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MARKS = " .:-=+#"
"""Of the levels, where there are no colours."""


def show(seen: Inspection, layer: int | None = None) -> None:
    """Print the layers, and the text with what is kept.

    Args:
        seen: What was seen.
        layer: One layer of the model to show the text of; None shows all layers' share.
    """
    from rich.console import Console

    console = Console(file=sys.stdout, width=width(), highlight=False, markup=False, emoji=False, soft_wrap=False)
    place = None if layer is None else seen.place(layer)
    coloured = console.color_system is not None and not console.no_color
    print("\n".join([*heading(seen), "", *layer_lines(seen, plain=not _unicode()), ""]))
    where = "all layers" if layer is None else f"layer {layer}"
    print(paragraph(f"The text: the share of the KV heads of {where} that keep each token."))
    lines = wrapped(seen.spans, width())
    if coloured:
        _print_colours(console, lines, place)
        return
    legend = ", ".join(f"{mark} {name}" for mark, name in zip(MARKS[1:], NAMES[1:], strict=True))
    print(paragraph(f"Under it: {legend}."), "", *marked(lines, place), sep="\n")


def heading(seen: Inspection) -> list[str]:
    """What ran, and what it took."""
    share = seen.nbytes / seen.full_nbytes if seen.full_nbytes else 1.0
    lines = [
        f"{seen.policy} on {seen.model}",
        f"{seen.kept:,.0f} of {seen.seen:,} tokens kept, the mean of layers and heads",
        f"{size(seen.nbytes)} held, the full cache {size(seen.full_nbytes)} ({share:.2f} of it)",
    ]
    return [paragraph(line) for line in [*lines, seen.note] if line]


def layer_lines(seen: Inspection, plain: bool = False) -> list[str]:
    """The layers, a line each: cosine, budget, tokens kept, and these as a bar with the even share on it.

    Args:
        seen: What was seen.
        plain: Whether bars are made of ASCII.
    """
    even = seen.kept
    most = max(even, *(layer.mean for layer in seen.layers), 1.0)
    head = f"{'layer':>5}  {'cosine':>6}  {'budget':>7}  {'kept':>7}  "
    room = min(width() - len(head), 60)
    lines = [f"{head}{'|' if plain else '│'} is the even share"]
    for layer in seen.layers:
        cosine = "-" if layer.cosine is None else f"{layer.cosine:.3f}"
        start = f"{layer.index:>5}  {cosine:>6}  {layer.budget:>7,}  {layer.mean:>7,.0f}  "
        lines.append((start + _bar(layer, even, most, room, plain)).rstrip())
    for index, window in seen.left_alone.items():
        lines.append(f"{index:>5}  left alone: a sliding window of {window:,}")
    return [*lines, *_about(seen)]


def _about(seen: Inspection) -> list[str]:
    if not seen.measured:
        return [paragraph("The layers' importance was not measured.")]
    text = "cosine: of the hidden state before and after attention; 1 where attention changes nothing. Measured"
    return [paragraph(f"{text} {seen.measured}.")]


def _bar(layer: Layer, even: float, most: float, room: int, plain: bool) -> str:
    full, empty, line = ("#", " ", "|") if plain else ("█", " ", "│")
    long = round(layer.mean / most * room)
    bar = full * long + empty * (room - long)
    at = min(round(even / most * room), room - 1)
    return bar[:at] + line + bar[at + 1 :]


def marked(lines: list[list[Piece]], place: int | None = None) -> Iterator[str]:
    """Each line of a text, and a line of marks under it.

    Args:
        lines: See `kvpolicy.shading.wrapped`.
        place: One layer among those under the policy, or all.
    """
    for line in lines:
        yield "".join(text for text, _ in line)
        marks = (MARKS[level(share_of(span, place))] * cells(text) for text, span in line)
        yield "".join(marks).rstrip()


def _print_colours(console: Console, lines: list[list[Piece]], place: int | None) -> None:
    from rich.text import Text

    legend = Text("")
    for number, name in enumerate(NAMES):
        legend.append(f" {name} ", _style(number))
        legend.append(" ")
    console.print(legend, Text(""), sep="\n")
    for line in lines:
        shown: Text = Text(no_wrap=True, overflow="ignore")
        for text, span in line:
            shown.append(text, _style(level(share_of(span, place))))
        console.print(shown, soft_wrap=True)


def _style(number: int) -> str:
    return f"{ink(SHADES[number - 1])} on {SHADES[number - 1]}" if number else "dim"


def _unicode() -> bool:
    """Whether standard output can carry the signs of the bars."""
    try:
        "█│".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
