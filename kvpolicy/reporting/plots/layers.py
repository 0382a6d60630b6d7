"""Layers: how much attention changes each, how many tokens each may keep, and which positions it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from kvpolicy.reporting.plots._style import (
    GREY,
    INK,
    MARKERS,
    PALE,
    PALETTE,
    SEQUENTIAL,
    canvas,
    figure_of,
    legend_above,
    whole_numbers,
)
from kvpolicy.reporting.plots.bytes import LayerTokens, Source, layer_tokens, named
from kvpolicy.reporting.report import CacheSource, HandleSource, cache_of
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.validation import check_index

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor


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


def layer_similarity(
    cosines: HandleSource | CacheSource | Tensor | Sequence[Sequence[float]],
    *,
    names: Sequence[str] | None = None,
    axes: Axes | None = None,
) -> Figure:
    """Plot the similarity of each layer's residual stream before and after attention: Figure 2 of SqueezeAttention.

    A cosine near 1 means that attention changes little in a layer, so that the layer needs fewer tokens. Unmanaged
    layers are not measured, and gray.

    Args:
        cosines: A handle or a cache, whose last prompt was measured by its allocator, with a row for each row of the
            batch; or cosines [prompts, layers], of which `kvpolicy.profile` returns a row.
        names: Names of the prompts; their numbers by default.
        axes: Axes to draw into, instead of a new figure.

    Returns:
        The figure.

    Raises:
        KVPolicyError: If nothing was measured, rows differ in length, or the number of names differs from the rows.

    Examples:
        >>> figure = layer_similarity([[0.3, 0.9, 0.99], [0.2, 0.8, 0.97]], names=["recall", "chat"])
        >>> figure.axes[0].get_xlabel(), figure.axes[0].images[0].get_array().shape
        ('layer', (2, 3))
    """
    rows = _rows(cosines)
    labels = [str(number) for number in range(len(rows))] if names is None else [str(name) for name in names]
    if len(labels) != len(rows):
        raise KVPolicyError(f"names must have one name per prompt, got {len(labels)} for {len(rows)} prompts.")
    with canvas(axes, (8.0, min(1.0 + 0.3 * len(rows), 9.0))) as own:
        heat(own, rows, labels, SEQUENTIAL, "cosine")
        own.set(xlabel="layer", ylabel="prompt" if names is None else "")
    return figure_of(own)


def budgets(source: Source | Mapping[str, Source], *, axes: Axes | None = None) -> Figure:
    """Plot how many tokens each layer may keep, and the even division.

    If the rows of a batch have different budgets, bars show their mean, and thin lines reach from the smallest to the
    largest. A plan shows its longest row.

    Args:
        source: A handle, a cache, a report or a plan; or a dictionary of these by name, drawn as lines.
        axes: Axes to draw into, instead of a new figure.

    Returns:
        The figure.

    Raises:
        KVPolicyError: If a cache has seen no prompt yet.

    Examples:
        >>> from kvpolicy import plan
        >>> from kvpolicy.hf.embedded import config_of
        >>> figure = budgets(plan(config_of("llama-2-70b"), "pyramid+h2o@0.2", prompt=1000, new=0))
        >>> bars = figure.axes[0].patches
        >>> len(bars), bool(bars[0].get_height() > bars[79].get_height()), figure.axes[0].get_ylabel()
        (80, True, 'budget, tokens')
    """
    found = {name: layer_tokens(one) for name, one in named(source).items()}
    with canvas(axes, (8.0, 2.8 + 0.17 * len(found))) as own:
        if isinstance(source, Mapping):
            _lines(own, found)
        else:
            _bars(own, next(iter(found.values())))
        _mark_unmanaged(own, {layer for one in found.values() for layer in one.unmanaged})
        most = max(max(one.tokens.keys() | set(one.unmanaged)) for one in found.values())
        own.set(xlabel="layer", xlim=(-0.6, most + 0.6))
        own.margins(y=0.08)
        own.set_ylim(bottom=0)
        whole_numbers(own.xaxis)
        rows = max(len(row) for one in found.values() for row in one.tokens.values())
        own.set_ylabel("budget, tokens" if rows == 1 else f"budget, tokens (mean of {rows} rows)")
        legend_above(own, axes is None)
    return figure_of(own)


def _rows(cosines: Any) -> list[list[float]]:
    import torch

    if isinstance(cosines, (HandleSource, CacheSource)):
        return _measured(cosines)
    if isinstance(cosines, torch.Tensor):
        cosines = cosines.tolist()
    try:
        rows = [[float(value) for value in row] for row in cosines]
    except (TypeError, ValueError):
        rows = list[list[float]]()
    if not rows or not rows[0] or any(len(row) != len(rows[0]) for row in rows):
        raise KVPolicyError("cosines must have a row per prompt, and in each row a number per layer.")
    return rows


def _measured(source: HandleSource | CacheSource) -> list[list[float]]:
    policy = source.policy
    if policy.layer_metric != "cosine":
        raise KVPolicyError(
            f"The allocator of the policy must measure layers, got {policy}; try squeeze+h2o@0.2, or pass the cosines "
            "that kvpolicy.profile returns."
        )
    cache = cache_of(source)
    if cache.plan is None:
        raise KVPolicyError("The cache must have seen a whole prompt; run the model first.")
    table = [[float("nan")] * len(cache.layers) for _ in range(cache.batch_size)]
    for row, values in zip(table, cache.cosines().tolist(), strict=True):
        for layer, value in zip(cache.policy_layers, values, strict=True):
            row[layer.layer_idx] = value
    return table


def _mean(rows: tuple[int, ...]) -> float:
    return sum(rows) / len(rows)


def _even(found: LayerTokens) -> float:
    return sum(map(_mean, found.tokens.values())) / max(1, len(found.tokens))


def _bars(axes: Axes, found: LayerTokens) -> None:
    means = [_mean(rows) for rows in found.tokens.values()]
    axes.bar(list(found.tokens), means, width=0.8, color=PALETTE[0], label=str(found.policy))
    if any(min(rows) < max(rows) for rows in found.tokens.values()):
        smallest = [min(rows) for rows in found.tokens.values()]
        largest = [max(rows) for rows in found.tokens.values()]
        axes.vlines(list(found.tokens), smallest, largest, color=INK, linewidth=1, label="range over the rows")
    _even_line(axes, _even(found), INK)


def _lines(axes: Axes, found: Mapping[str, LayerTokens]) -> None:
    for number, (name, one) in enumerate(found.items()):
        means = [_mean(rows) for rows in one.tokens.values()]
        color = PALETTE[number % len(PALETTE)]
        marker = MARKERS[number % len(MARKERS)] if len(means) <= 40 else ""
        width = 1.4 + 0.8 * min(len(found) - 1 - number, 3)  # decreasing, so that equal lines stay visible
        shown: Any = {"marker": marker, "markersize": 2.6 + width}
        axes.plot(list(one.tokens), means, color=color, linewidth=width, label=name, **shown)
    divisions = {round(_even(one)): number for number, one in reversed(list(enumerate(found.values())))}
    for tokens, number in divisions.items():
        _even_line(axes, tokens, INK if len(divisions) == 1 else PALETTE[number % len(PALETTE)])


def _even_line(axes: Axes, tokens: float, color: str) -> None:
    axes.axhline(tokens, color=color, linestyle="--", linewidth=1.2, label=f"even division: {tokens:,.0f} tokens")


def _mark_unmanaged(axes: Axes, layers: set[int]) -> None:
    for number, layer in enumerate(sorted(layers)):
        label = None if number else "unmanaged (sliding window)"
        axes.axvspan(layer - 0.5, layer + 0.5, facecolor=PALE, edgecolor=GREY, hatch="//", alpha=0.5, lw=0, label=label)
