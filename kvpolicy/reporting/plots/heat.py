"""Heat maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from kvpolicy.reporting.plots._style import PALE, figure_of

MAX_NUMBERS = 20
"""The most columns of a heat map that shows its numbers."""


def field(
    axes: Axes,
    rows: Any,
    colors: str,
    low: float,
    high: float,
    extent: tuple[float, float, float, float] | None = None,
) -> Any:
    """Draw numbers as an image, with NaN in a pale gray.

    Args:
        axes: The axes.
        rows: [rows][columns] of numbers.
        colors: Name of the color map.
        low: The number at its lower end.
        high: The number at its upper end.
        extent: Left, right, bottom and top, as in `imshow`.

    Returns:
        The image.
    """
    scale = matplotlib.colormaps[colors].with_extremes(bad=PALE)
    values = np.asarray(rows, dtype=float)
    limits: Any = {"vmin": low, "vmax": high, "extent": extent}
    image = axes.imshow(values, aspect="auto", cmap=scale, interpolation="nearest", **limits)
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
    """Draw a heat map with a color bar, and with its numbers if there is room.

    Args:
        axes: The axes.
        rows: A row of numbers for each name; NaN if there is none.
        names: Names of the rows.
        colors: Name of the color map.
        label: Label of the color bar.
        number: Format of the numbers.
        middle: The number in the middle of the color map; by default it covers the smallest to the largest number.

    Returns:
        The image.
    """
    values = [value for row in rows for value in row if not math.isnan(value)] or [0.0]
    low = min(values)
    high = max(values)
    if middle is not None:
        reach = max(0.05, *(abs(value - middle) for value in values))
        low = middle - reach
        high = middle + reach
    image = field(axes, rows, colors, low, high)
    every = math.ceil(len(names) / 40)
    axes.set_yticks(range(0, len(names), every), names[::every], fontsize=8)
    axes.set_xticks(range(0, len(rows[0]), math.ceil(len(rows[0]) / MAX_NUMBERS)))
    if len(rows[0]) <= MAX_NUMBERS and len(rows) <= 2 * MAX_NUMBERS:
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
