"""The style of plots: colors for color-blind readers, and figures that do not change the state of matplotlib."""

from __future__ import annotations

import io
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.container import Container
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError("Plots need matplotlib, which is not installed; run pip install 'kvpolicy[plots]'.") from error

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#A0522D")
"""The palette of Okabe and Ito, with a brown in place of black and yellow, which some backgrounds hide."""
MARKERS = "osD^vPX"
GREY = "#8a8a8a"
SEQUENTIAL = "viridis"
DIVERGING = "PuOr"
INK = "#222222"
PALE = "#dddddd"
"""Unmanaged layers, and values that were not measured."""

KINDS = {
    "full cache": "#b5b5b5",
    "exact": PALETTE[0],
    "host": "#7fb8d8",
    "codes": PALETTE[1],
    "scales": PALETTE[5],
    "positions": PALETTE[2],
    "statistics": PALETTE[3],
    "index": "#4B0082",
    "counters": PALETTE[4],
    "counts": "#F0E442",
    "waiting prompt": PALETTE[6],
    "unmanaged": PALE,
}
"""The color of each kind of bytes, in stacking order."""

RC: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    # A white background, so that figures are readable on dark pages too.
    "axes.facecolor": "white",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}
"""The matplotlib settings of new figures."""


class Picture(Figure):
    """A figure that notebooks display, whether or not pyplot is loaded."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=144)
        return out.getvalue()


@contextmanager
def canvas(axes: Axes | None, size: tuple[float, float]) -> Generator[Axes, None, None]:
    """The axes to draw into: those given, with the caller's settings, or new ones with ours.

    Args:
        axes: The axes, or None.
        size: Size of a new figure, in inches.
    """
    if axes is not None:
        yield axes
        return
    with matplotlib.rc_context(RC):
        figure = Picture(figsize=size, layout="constrained")
        own = figure.add_subplot()
        own.tick_params(color=INK, labelcolor=INK)  # ticks are created on drawing, when these settings have ended
        yield own


def whole_numbers(axis: Axis) -> None:
    """Put ticks at integers only."""
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def legend_above(axes: Axes, own: bool, columns: int = 5) -> None:
    """Add a legend, bars first: above new axes, or at the best place of axes that the caller gave.

    Args:
        axes: The axes.
        own: Whether they are new.
        columns: The most names in a row.
    """
    handles, names = axes.get_legend_handles_labels()
    order = sorted(range(len(names)), key=lambda at: not isinstance(handles[at], Container))
    handles = [handles[at] for at in order]
    names = [names[at] for at in order]
    columns = max(1, min(len(names), columns, 120 // (7 + max(map(len, names)))))
    if own:
        figure_of(axes).legend(handles, names, loc="outside upper left", ncols=columns)
    else:
        axes.legend(handles, names, ncols=columns)


def figure_of(axes: Axes) -> Figure:
    """The figure of axes, also if these are in a subfigure."""
    figure: Any = axes.figure
    return figure if isinstance(figure, Figure) else figure.figure
