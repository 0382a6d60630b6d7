"""An inspection in the terminal: in colors, or with marks below the text if the terminal has none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvpolicy.cli.comparison import held
from kvpolicy.cli.formatting import paragraph, size, width
from kvpolicy.cli.inspection import Inspection, Layer
from kvpolicy.reporting.text_rendering import NAMES, SHADES, Piece, cells, ink, level, share_of, wrapped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MARKS = " .:-=+#"
"""The mark of each level, for terminals without colors."""


def show(inspection: Inspection, layer: int | None = None) -> None:
    """Print the layers, and the text with the kept tokens.

    Args:
        inspection: The inspection.
        layer: The layer whose tokens are shown; by default the average over all layers is shown.
    """
    from rich.console import Console

    console = Console(file=sys.stdout, width=width(), highlight=False, markup=False, emoji=False, soft_wrap=False)
    position = None if layer is None else inspection.position_of(layer)
    has_colors = console.color_system is not None and not console.no_color
    print("\n".join([*heading(inspection), "", *layer_lines(inspection, ascii_only=not _supports_unicode()), ""]))
    heads = "KV heads in all layers" if layer is None else f"KV heads of layer {layer}"
    print(paragraph(f"Text: the fraction of the {heads} that keep each token."))
    lines = wrapped(inspection.spans, width())
    if has_colors:
        _print_colored(console, lines, position)
        return
    legend = ", ".join(f"{mark} {name}" for mark, name in zip(MARKS[1:], NAMES[1:], strict=True))
    print(paragraph(f"Marks: {legend}."), "", *marked(lines, position), sep="\n")


def heading(inspection: Inspection) -> list[str]:
    """Return the lines about the whole run."""
    lines = [
        f"{inspection.policy} on {inspection.model}",
        f"kept: {inspection.kept:,.0f} of {inspection.seen:,} tokens (mean over layers and KV heads)",
        f"bytes: {held(inspection.nbytes, inspection.full_nbytes)}",
    ]
    if inspection.moved != inspection.all_moved:  # the policy has a reader
        lines.append(f"moved per decode step: {size(inspection.moved)}; all that is kept: {size(inspection.all_moved)}")
    if inspection.note:
        lines.append(f"note: {inspection.note}")
    return [paragraph(line) for line in lines]


def layer_lines(inspection: Inspection, ascii_only: bool = False) -> list[str]:
    """Return one line per layer: cosine, budget, kept tokens, and a bar of the kept tokens with the mean marked.

    Args:
        inspection: The inspection.
        ascii_only: Whether to draw the bars with ASCII characters.
    """
    mean = inspection.kept
    longest = max(mean, *(layer.mean for layer in inspection.layers), 1.0)
    header = f"{'layer':>5}  {'cosine':>6}  {'budget':>7}  {'kept':>7}  "
    columns = min(width() - len(header), 60)
    lines = [f"{header}{'|' if ascii_only else '│'} mean"]
    for layer in inspection.layers:
        cosine = "-" if layer.cosine is None else f"{layer.cosine:.3f}"
        start = f"{layer.index:>5}  {cosine:>6}  {layer.budget:>7,}  {layer.mean:>7,.0f}  "
        lines.append((start + _bar(layer, mean, longest, columns, ascii_only)).rstrip())
    for index, window in inspection.unmanaged.items():
        lines.append(f"{index:>5}  unmanaged: sliding window of {window:,} tokens")
    for index in inspection.states:
        lines.append(f"{index:>5}  unmanaged: a state")
    return [*lines, paragraph(_about_cosine(inspection))]


def _about_cosine(inspection: Inspection) -> str:
    if not inspection.measured:
        return "The importance of the layers was not measured."
    return (
        "cosine: cosine similarity of the hidden states before and after attention (1 if attention changes nothing), "
        f"measured {inspection.measured}."
    )


def _bar(layer: Layer, mean: float, longest: float, columns: int, ascii_only: bool) -> str:
    filled = "#" if ascii_only else "█"
    length = round(layer.mean / longest * columns)
    bar = filled * length + " " * (columns - length)
    marker = min(round(mean / longest * columns), columns - 1)
    return bar[:marker] + ("|" if ascii_only else "│") + bar[marker + 1 :]


def marked(lines: list[list[Piece]], position: int | None = None) -> Iterator[str]:
    """Yield each line of a text, followed by a line of marks.

    Args:
        lines: The result of `kvpolicy.reporting.text_rendering.wrapped`.
        position: The position of a layer among those under the policy, or None for all.
    """
    for line in lines:
        yield "".join(text for text, _ in line)
        marks = (MARKS[level(share_of(span, position))] * cells(text) for text, span in line)
        yield "".join(marks).rstrip()


def _print_colored(console: Console, lines: list[list[Piece]], position: int | None) -> None:
    from rich.text import Text

    legend = Text("")
    for number, name in enumerate(NAMES):
        legend.append(f" {name} ", _style(number))
        legend.append(" ")
    console.print(legend, Text(""), sep="\n")
    for line in lines:
        colored: Text = Text(no_wrap=True, overflow="ignore")
        for text, span in line:
            colored.append(text, _style(level(share_of(span, position))))
        console.print(colored, soft_wrap=True)


def _style(number: int) -> str:
    return f"{ink(SHADES[number - 1])} on {SHADES[number - 1]}" if number else "dim"


def _supports_unicode() -> bool:
    """Return whether standard output can encode the characters of the bars."""
    try:
        "█│".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
