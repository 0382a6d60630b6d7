"""The positions that each layer holds, and heat maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from kvpolicy.reporting.plots._style import PALE, SEQUENTIAL, canvas, figure_of, whole_numbers
from kvpolicy.reporting.report import CacheSource, HandleSource, cache_of
from kvpolicy.text.validation import check_index

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


COLUMNS = 1024
"""The most columns of a plot; several positions of a longer text share a column."""


def kept(
    source: HandleSource | CacheSource, *, row: int = 0, head: int | None = None, axes: Axes | None = None
) -> Figure:
    """Plot which positions each layer holds: layers from top to bottom, positions from left to right.

    The color is the fraction of the layer's KV heads that hold the token. If there are more than 1,024 positions,
    several share a cell, which shows their mean. Unmanaged layers are gray.

    Args:
        source: A handle or a cache, in its current state: after a prompt, or after some steps.
        row: Index of the row in the batch. Positions are counted without padding.
        head: Index of one KV head to plot, instead of all.
        axes: Axes to draw into, instead of a new figure.

    Returns:
        The figure.

    Raises:
        KVPolicyError: If the cache has seen no prompt, or has no such row or head.
        KVPolicyTypeError: If one of these is not an integer.

    Examples:
        >>> import torch, kvpolicy
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=9)
        >>> model = LlamaForCausalLM(config).eval()
        >>> with torch.no_grad(), kvpolicy.attach(model, "streaming:sinks=1@0.5") as handle:
        ...     _ = model(torch.arange(8)[None])
        ...     figure = kept(handle)
        >>> figure.axes[0].images[0].get_array().astype(int).tolist()
        [[1, 0, 0, 0, 0, 1, 1, 1], [1, 0, 0, 0, 0, 1, 1, 1]]
    """
    shares, seen = held_shares(cache_of(source), row, head)
    layers = len(shares)
    with canvas(axes, (8.0, min(1.5 + 0.14 * layers, 6.5))) as own:
        extent = (0, max(seen, 1), layers - 0.5, -0.5)
        image = field(own, shares, SEQUENTIAL, 0, 1, extent)
        own.set(xlabel="position, tokens", ylabel="layer")
        whole_numbers(own.xaxis)
        whole_numbers(own.yaxis)
        if not seen:
            own.text(0.5, 0.5, "this row has no tokens", transform=own.transAxes, ha="center", va="center")
        bar = figure_of(own).colorbar(image, ax=own, pad=0.01)
        bar.set_label("fraction of KV heads" if head is None else f"held by KV head {head}")
    return figure_of(own)


def held_shares(cache: CacheSource, row: int = 0, head: int | None = None, columns: int = COLUMNS) -> tuple[Any, int]:
    """The fraction of KV heads that hold each position, averaged over neighbors if there are many positions.

    Args:
        cache: A cache that has seen a prompt.
        row: Index of the row in the batch.
        head: Index of one KV head, instead of all.
        columns: The most columns.

    Returns:
        Fractions [layers, columns] as an array, NaN for unmanaged layers, and the number of tokens seen.

    Raises:
        KVPolicyError: If the cache has no such row or head.
        KVPolicyTypeError: If one of these is not an integer.
    """
    batch, heads = cache.policy_layers[0].head_positions.shape[:2]
    at = check_index("row", row, batch)
    chosen = slice(None) if head is None else slice(check_index("head", head, heads), head + 1)
    seen = max(int(layer.length[at]) for layer in cache.policy_layers)
    width = max(1, min(seen, columns))
    # Position p is in column p * width // seen; `sizes` counts the positions of each column, to take means.
    sizes = np.maximum(np.bincount(np.arange(seen) * width // max(seen, 1), minlength=width), 1)
    table = np.full((len(cache.layers), width), np.nan)
    for layer in cache.policy_layers:
        positions = layer.head_positions[at, chosen].cpu().numpy().astype(np.int64)
        here = positions[positions >= 0]
        table[layer.layer_idx] = np.bincount(here * width // max(seen, 1), minlength=width) / sizes / len(positions)
    return table, seen
