"""How pictures look: colours that the colour-blind can tell apart, and figures that leave no state behind."""

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
    raise ImportError("Pictures need matplotlib, which is not installed: pip install 'kvpolicy[plots]'.") from error

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#A0522D")
"""Okabe and Ito's, and in place of black and yellow, which white or dark would swallow, a brown."""
MARKERS = "osD^vPX"
GREY = "#8a8a8a"
SEQUENTIAL = "viridis"
DIVERGING = "PuOr"
INK = "#222222"
PALE = "#dddddd"
"""What a policy leaves alone, or what was not measured."""

KINDS = {
    "full cache": "#b5b5b5",
    "exact": PALETTE[0],
    "codes": PALETTE[1],
    "scales": PALETTE[5],
    "positions": PALETTE[2],
    "statistics": PALETTE[3],
    "counters": PALETTE[4],
    "waiting prompt": PALETTE[6],
    "left alone": PALE,
}
"""The colour of each kind of bytes, in the order in which they are stacked."""

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
    # White behind and around it, so that it can be read on a dark page too.
    "axes.facecolor": "white",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}
"""Settings of matplotlib under which a figure of our own is drawn."""


class Picture(Figure):
    """A figure that notebooks show, whether or not pyplot was ever loaded."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=144)
        return out.getvalue()


@contextmanager
def canvas(axes: Axes | None, size: tuple[float, float]) -> Generator[Axes, None, None]:
    """Where to draw: the axes given, under the settings that the caller has, or new ones under ours.

    Args:
        axes: To draw into, or None.
        size: Of a new figure, in inches.
    """
    if axes is not None:
        yield axes
        return
    with matplotlib.rc_context(RC):
        figure = Picture(figsize=size, layout="constrained")
        own = figure.add_subplot()
        own.tick_params(color=INK, labelcolor=INK)  # ticks are made when drawn, under other settings
        yield own


def whole_numbers(axis: Axis) -> None:
    """Put ticks at whole numbers only: there is no half a layer."""
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def legend_above(axes: Axes, own: bool, columns: int = 5) -> None:
    """Write the names of what was drawn above the axes, where they hide nothing; bars first.

    Args:
        axes: Drawn into.
        own: Whether they are alone in a figure of ours; else the legend is left to the place that suits it best.
        columns: The most names on a line.
    """
    handles, names = axes.get_legend_handles_labels()
    order = sorted(range(len(names)), key=lambda at: not isinstance(handles[at], Container))
    handles, names = [handles[at] for at in order], [names[at] for at in order]
    columns = max(1, min(len(names), columns, 120 // (7 + max(map(len, names)))))
    if own:
        figure_of(axes).legend(handles, names, loc="outside upper left", ncols=columns)
    else:
        axes.legend(handles, names, ncols=columns)


def figure_of(axes: Axes) -> Figure:
    """The whole figure that axes are in."""
    figure: Any = axes.figure
    return figure if isinstance(figure, Figure) else figure.figure
