"""A text with its tokens shaded by the fraction of layers and heads that keep them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvpolicy.reporting.report import CacheSource, HandleSource, cache_of
from kvpolicy.reporting.token_spans import LIGHT, NAMES, Piece, cells, ink, level, share_of, wrapped
from kvpolicy.reporting.token_spans import pieces as pieces
from kvpolicy.reporting.token_spans import spans as spans
from kvpolicy.text.errors import KVPolicyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path

COLUMNS = 80
"""Characters of a line."""
WIDE = 0.602
"""Width of a character of DejaVu Sans Mono, in font sizes."""
HIGH = 1.5
"""Distance of lines, in font sizes."""
POINTS = 9.0
"""Font size."""
FAINT = "#767676"
"""The color of tokens that no head keeps: a gray with equal contrast on white and on dark pages."""
UNKNOWN = "□"
"""Shown for characters that the font lacks."""


def token_text(
    source: HandleSource | CacheSource,
    tokens: Sequence[str],
    *,
    layer: int | None = None,
    row: int = 0,
    axes: Axes | None = None,
) -> Figure:
    """Plot a text with its tokens shaded by the fraction of KV heads that keep them.

    A token that no head keeps has no shade. Lines break between words, and the newlines of the text are shown as
    arrows. Characters that the monospaced font of matplotlib lacks, such as Chinese ones, are drawn as boxes.

    Args:
        source: A handle or a cache, in its current state: after a prompt, or after some steps.
        tokens: Every token of the row as text, without padding: `kvpolicy.spans.pieces(tokenizer, ids)`.
        layer: Index of one layer under the policy, instead of all.
        row: Index of the row in the batch.
        axes: Axes to draw into, instead of a new figure.

    Returns:
        The figure.

    Raises:
        KVPolicyError: If the cache has seen no prompt, has no such row or layer, or has seen more tokens.

    Examples:
        >>> import torch, kvpolicy
        >>> model, tokenizer = kvpolicy.tiny()
        >>> ids = tokenizer("tiger=4821", return_tensors="pt").input_ids
        >>> with torch.no_grad(), kvpolicy.attach(model, "streaming:sinks=1@0.5") as handle:
        ...     _ = model(ids)
        >>> figure = token_text(handle, pieces(tokenizer, ids[0].tolist()))
        >>> figure.axes[0].get_title()
        'fraction of the KV heads of all layers that keep each token'
    """
    from kvpolicy.reporting.plots._style import canvas, figure_of  # pyright: ignore[reportPrivateUsage]

    found = spans(source, tokens, row=row)
    place = None if layer is None else _place(cache_of(source), layer)
    lines = wrapped(found, COLUMNS)
    size = (COLUMNS * WIDE * POINTS / 72 + 0.3, (max(len(lines), 1) * HIGH * POINTS) / 72 + 0.8)
    with canvas(axes, size) as own:
        _draw(own, lines, place)
        where = "all layers" if layer is None else f"layer {layer}"
        own.set_title(f"fraction of the KV heads of {where} that keep each token")
        _legend(own)
    return figure_of(own)


def _place(cache: CacheSource, layer: int) -> int:
    known = [managed.layer_idx for managed in cache.policy_layers]
    if layer not in known:
        raise KVPolicyError(f"layer must be one of {', '.join(map(str, known))} under the policy, got {layer}.")
    return known.index(layer)


def _draw(axes: Axes, lines: list[list[Piece]], place: int | None) -> None:
    """Draw the shades, then the characters, in one patch per color."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import PathPatch, Rectangle
    from matplotlib.path import Path

    glyphs = _Glyphs()
    fields: list[Any] = []
    shades: list[str] = []
    chars: dict[str, list[Path]] = {}
    for number, line in enumerate(lines):
        column = 0
        y = -HIGH * number
        for text, span in line:
            shade = level(share_of(span, place))
            if shade:
                size = (cells(text) * WIDE, HIGH * 0.88)
                fields.append(Rectangle((column * WIDE, y - HIGH * 0.28), *size))
                shades.append(LIGHT[shade - 1])
            color = ink(LIGHT[shade - 1]) if shade else FAINT
            chars.setdefault(color, []).extend(glyphs.path(text, column * WIDE, y))
            column += cells(text)
    axes.add_collection(PatchCollection(fields, facecolors=shades, edgecolors="white", linewidths=0.3))
    for color, paths in chars.items():
        if paths:
            axes.add_patch(PathPatch(Path.make_compound_path(*paths), facecolor=color, linewidth=0))
    axes.set(xlim=(0, COLUMNS * WIDE), ylim=(-HIGH * (len(lines) - 0.6), HIGH * 0.8), aspect="equal")
    axes.set_axis_off()


class _Glyphs:
    """Outlines of the characters of a monospaced font, one unit high."""

    def __init__(self) -> None:
        from matplotlib.font_manager import FontProperties, findfont, get_font

        self._font = FontProperties(family="DejaVu Sans Mono")
        self._known = get_font(findfont(self._font))
        self._made: dict[str, Path] = {}

    def path(self, text: str, x: float, y: float) -> list[Path]:
        """The outlines of a text at a position."""
        from matplotlib.transforms import Affine2D

        found: list[Path] = []
        for char in text:
            if not char.isspace():
                found.append(Affine2D().translate(x, y).transform_path(self._outline(char)))
            x += cells(char) * WIDE
        return found

    def _outline(self, char: str) -> Path:
        from matplotlib.textpath import TextPath

        if char not in self._made:
            shown = char if self._known.get_char_index(ord(char)) else UNKNOWN
            self._made[char] = TextPath((0, 0), shown, size=1, prop=self._font)
        return self._made[char]


def _legend(axes: Axes) -> None:
    from matplotlib.patches import Patch

    colors = ("none", *LIGHT)
    pairs = zip(colors, NAMES, strict=True)
    handles = [Patch(facecolor=color, edgecolor=FAINT, linewidth=0.3, label=name) for color, name in pairs]
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=len(handles),
        fontsize=7,
        frameon=False,
        handlelength=1.2,
        columnspacing=1.0,
    )
