"""Layers: how much attention changes each, and how many tokens each may keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
from kvpolicy.reporting.plots.tokens import heat
from kvpolicy.reporting.report import CacheSource, HandleSource, cache_of
from kvpolicy.text.errors import KVPolicyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor


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
