"""The text itself, its tokens shaded by the share of layers and heads that keep them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvpolicy.reporting.report import cache_of
from kvpolicy.reporting.sources import CacheSource, HandleSource
from kvpolicy.reporting.text_rendering import LIGHT, NAMES, Piece, cells, ink, level, share_of, wrapped
from kvpolicy.reporting.token_spans import pieces as pieces
from kvpolicy.reporting.token_spans import spans as spans
from kvpolicy.spec.errors import KVPolicyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path

COLUMNS = 80
"""Letters of a line."""
WIDE, HIGH = 0.602, 1.5
"""Of a letter's field, in heights of the font: DejaVu Sans Mono's width, and the distance of lines."""
POINTS = 9.0
FAINT = "#767676"
"""Of tokens that no head keeps: the darkest grey that is read as well on white as on a dark page."""
UNKNOWN = "□"
"""In place of a letter that the font does not have."""


def token_text(
    source: HandleSource | CacheSource,
    tokens: Sequence[str],
    *,
    layer: int | None = None,
    row: int = 0,
    axes: Axes | None = None,
) -> Figure:
    """Draw a text with its tokens shaded by the share of the KV heads that keep them.

    A token that none keeps has no shade. Lines break between words; the newlines of the text are shown as arrows. A
    letter that matplotlib's own monospaced font lacks, such as a Chinese one, is drawn as a box.

    Args:
        source: A handle or a cache, as it is now: after a prompt, or after some steps.
        tokens: Every token of the row as text, without padding: `kvpolicy.spans.pieces(tokenizer, ids)`.
        layer: One layer of the model, in place of all that are under the policy.
        row: Of the batch.
        axes: To draw into, in place of a new figure.

    Returns:
        The figure.

    Raises:
        KVPolicyError: Where the cache has seen no prompt, has no such row or layer, or has seen more tokens.

    Examples:
        >>> import torch, kvpolicy
        >>> model, tokenizer = kvpolicy.tiny()
        >>> ids = tokenizer("tiger=4821", return_tensors="pt").input_ids
        >>> with torch.no_grad(), kvpolicy.attach(model, "streaming:sinks=1@0.5") as handle:
        ...     _ = model(ids)
        >>> figure = token_text(handle, pieces(tokenizer, ids[0].tolist()))
        >>> figure.axes[0].get_title()
        'share of the KV heads of all layers that keep each token'
    """
    from kvpolicy.reporting.plots._style import canvas, figure_of  # pyright: ignore[reportPrivateUsage]

    found = spans(source, tokens, row=row)
    place = None if layer is None else _place(cache_of(source), layer)
    lines = wrapped(found, COLUMNS)
    size = (COLUMNS * WIDE * POINTS / 72 + 0.3, (max(len(lines), 1) * HIGH * POINTS) / 72 + 0.8)
    with canvas(axes, size) as own:
        _draw(own, lines, place)
        where = "all layers" if layer is None else f"layer {layer}"
        own.set_title(f"share of the KV heads of {where} that keep each token")
        _legend(own)
    return figure_of(own)


def _place(cache: CacheSource, layer: int) -> int:
    known = [slots.layer_idx for slots in cache.policy_layers]
    if layer not in known:
        raise KVPolicyError(f"There is no layer {layer} under the policy: there are {', '.join(map(str, known))}.")
    return known.index(layer)


def _draw(axes: Axes, lines: list[list[Piece]], place: int | None) -> None:
    """Fields first, then all letters of one colour together."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import PathPatch, Rectangle
    from matplotlib.path import Path

    glyphs, fields, shades = _Glyphs(), list[Any](), list[str]()
    letters: dict[str, list[Path]] = {}
    for number, line in enumerate(lines):
        column, y = 0, -HIGH * number
        for text, span in line:
            shade = level(share_of(span, place))
            if shade:
                size = (cells(text) * WIDE, HIGH * 0.88)
                fields.append(Rectangle((column * WIDE, y - HIGH * 0.28), *size))
                shades.append(LIGHT[shade - 1])
            colour = ink(LIGHT[shade - 1]) if shade else FAINT
            letters.setdefault(colour, []).extend(glyphs.path(text, column * WIDE, y))
            column += cells(text)
    axes.add_collection(PatchCollection(fields, facecolors=shades, edgecolors="white", linewidths=0.3))
    for colour, paths in letters.items():
        if paths:
            axes.add_patch(PathPatch(Path.make_compound_path(*paths), facecolor=colour, linewidth=0))
    axes.set(xlim=(0, COLUMNS * WIDE), ylim=(-HIGH * (len(lines) - 0.6), HIGH * 0.8), aspect="equal")
    axes.set_axis_off()


class _Glyphs:
    """Outlines of a monospaced font's letters, one unit high."""

    def __init__(self) -> None:
        from matplotlib.font_manager import FontProperties, findfont, get_font

        self._font = FontProperties(family="DejaVu Sans Mono")
        self._known = get_font(findfont(self._font))
        self._made: dict[str, Path] = {}

    def path(self, text: str, x: float, y: float) -> list[Path]:
        """The letters of a text in their fields."""
        from matplotlib.transforms import Affine2D

        found: list[Path] = []
        for letter in text:
            if not letter.isspace():
                found.append(Affine2D().translate(x, y).transform_path(self._outline(letter)))
            x += cells(letter) * WIDE
        return found

    def _outline(self, letter: str) -> Path:
        from matplotlib.textpath import TextPath

        if letter not in self._made:
            shown = letter if self._known.get_char_index(ord(letter)) else UNKNOWN
            self._made[letter] = TextPath((0, 0), shown, size=1, prop=self._font)
        return self._made[letter]


def _legend(axes: Axes) -> None:
    from matplotlib.patches import Patch

    names = enumerate(NAMES[1:])
    handles = [Patch(facecolor=LIGHT[at], edgecolor=FAINT, linewidth=0.3, label=name) for at, name in names]
    handles.insert(0, Patch(facecolor="none", edgecolor=FAINT, linewidth=0.3, label=NAMES[0]))
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=len(handles), fontsize=7, frameon=False,
        handlelength=1.2, columnspacing=1.0,
    )  # fmt: skip
