"""Numbers as coloured fields."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from kvpolicy.reporting.plots._style import PALE, figure_of

MOST_NUMBERS = 20
"""Up to so many columns, the numbers stand in their fields."""


def field(
    axes: Axes,
    rows: Any,
    colors: str,
    low: float,
    high: float,
    extent: tuple[float, float, float, float] | None = None,
) -> Any:
    """Draw an image of numbers, in which what is NaN is pale.

    Args:
        axes: To draw into.
        rows: [rows][columns] of numbers.
        colors: Name of the colour map.
        low: Where it begins.
        high: Where it ends.
        extent: Left, right, bottom and top, as in `imshow`.

    Returns:
        The image.
    """
    scale = matplotlib.colormaps[colors].with_extremes(bad=PALE)
    values = np.asarray(rows, dtype=float)
    image = axes.imshow(
        values, aspect="auto", cmap=scale, vmin=low, vmax=high, interpolation="nearest", extent=extent
    )  # fmt: skip
    axes.grid(visible=False)
    return image


def heat(
    axes: Axes,
    rows: Sequence[Sequence[float]],
    names: Sequence[str],
    colors: str,
    label: str,
    number: str = ".2f",
    middle: float | None = None,
) -> Any:
    """Draw rows of numbers with a bar of colours, and the numbers in their fields where there is room.

    Args:
        axes: To draw into.
        rows: A row of numbers for each name; NaN where there is none.
        names: Of the rows.
        colors: Name of the colour map.
        label: Of the bar.
        number: How a number is written.
        middle: The number in the middle of the colours; else they go from the least to the most.

    Returns:
        The image.
    """
    values = [value for row in rows for value in row if not math.isnan(value)] or [0.0]
    low, high = min(values), max(values)
    if middle is not None:
        reach = max(0.05, *(abs(value - middle) for value in values))
        low, high = middle - reach, middle + reach
    image = field(axes, rows, colors, low, high)
    every = math.ceil(len(names) / 40)
    axes.set_yticks(range(0, len(names), every), names[::every], fontsize=8)
    axes.set_xticks(range(0, len(rows[0]), math.ceil(len(rows[0]) / MOST_NUMBERS)))
    if len(rows[0]) <= MOST_NUMBERS and len(rows) <= 2 * MOST_NUMBERS:
        _write(axes, rows, image, number)
    bar = figure_of(axes).colorbar(image, ax=axes, pad=0.01)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return image


def _write(axes: Axes, rows: Sequence[Sequence[float]], image: Any, number: str) -> None:
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            if math.isnan(value):
                continue
            red, green, blue, _ = image.to_rgba(value)
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            color = "#fff" if dark else "#000"
            axes.text(x, y, format(value, number), ha="center", va="center", fontsize=7.5, color=color)
