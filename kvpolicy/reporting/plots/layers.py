"""Layers: how much attention changes each, and how many tokens each may keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvpolicy.reporting.plots._sources import LayerTokens, Source, layer_tokens, named
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
from kvpolicy.reporting.plots.heat import heat
from kvpolicy.reporting.report import cache_of
from kvpolicy.reporting.sources import CacheSource, HandleSource
from kvpolicy.spec.errors import KVPolicyError

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
    """Draw how similar each layer's residual stream is before and after attention: SqueezeAttention's Figure 2.

    A cosine near 1 means that attention changes little there, so that the layer can do with fewer tokens. Layers that
    a policy leaves alone are not measured, and are grey.

    Args:
        cosines: A handle or a cache, whose last prompt was measured by its allocator, one row for each of the batch;
            or cosines [prompts, layers], of which `kvpolicy.profile` returns a row.
        names: Of the prompts; their numbers by default.
        axes: To draw into, in place of a new figure.

    Returns:
        The figure.

    Raises:
        KVPolicyError: Where nothing was measured, rows differ in length, or names do not fit the rows.

    Examples:
        >>> figure = layer_similarity([[0.3, 0.9, 0.99], [0.2, 0.8, 0.97]], names=["recall", "chat"])
        >>> figure.axes[0].get_xlabel(), figure.axes[0].images[0].get_array().shape
        ('layer', (2, 3))
    """
    rows = _rows(cosines)
    labels = [str(number) for number in range(len(rows))] if names is None else [str(name) for name in names]
    if len(labels) != len(rows):
        raise KVPolicyError(f"There are {len(labels)} names for {len(rows)} prompts: give one for each.")
    with canvas(axes, (8.0, min(1.0 + 0.3 * len(rows), 9.0))) as own:
        heat(own, rows, labels, SEQUENTIAL, "cosine")
        own.set(xlabel="layer", ylabel="prompt" if names is None else "")
    return figure_of(own)


def budgets(source: Source | Mapping[str, Source], *, axes: Axes | None = None) -> Figure:
    """Draw how many tokens each layer may keep, beside the even share.

    Where the rows of a batch have budgets of their own, bars are their mean and thin lines reach from the least to the
    most. A plan shows its longest row.

    Args:
        source: A handle, a cache, a report or a plan; or a dictionary of these by name, drawn as lines.
        axes: To draw into, in place of a new figure.

    Returns:
        The figure.

    Raises:
        KVPolicyError: Where a cache has seen no prompt yet.

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
        _grey(own, {layer for one in found.values() for layer in one.alone})
        most = max(max(one.tokens.keys() | set(one.alone)) for one in found.values())
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
        raise KVPolicyError("The cosines are no table: give a row for each prompt, and in it a number for each layer.")
    return rows


def _measured(source: HandleSource | CacheSource) -> list[list[float]]:
    policy = source.policy
    if not policy.allocator.layer_metric:
        raise KVPolicyError(
            f"The policy {policy} measures no layers: attach one whose allocator does, such as squeeze+h2o@0.2, or "
            "give the cosines that kvpolicy.profile returns."
        )
    cache = cache_of(source)
    if cache.plan is None:
        raise KVPolicyError("The cache has seen no whole prompt yet: run the model first.")
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
        least, most = ([pick(rows) for rows in found.tokens.values()] for pick in (min, max))
        axes.vlines(list(found.tokens), least, most, color=INK, linewidth=1, label="least to most of the rows")
    _share(axes, _even(found), INK)


def _lines(axes: Axes, found: Mapping[str, LayerTokens]) -> None:
    for number, (name, one) in enumerate(found.items()):
        means = [_mean(rows) for rows in one.tokens.values()]
        color, marker = PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]
        wide = 1.4 + 0.8 * min(len(found) - 1 - number, 3)  # so that of equal lines every one is seen
        shown: Any = {"marker": marker if len(means) <= 40 else "", "markersize": 2.6 + wide}
        axes.plot(list(one.tokens), means, color=color, linewidth=wide, label=name, **shown)
    shares = {round(_even(one)): number for number, one in reversed(list(enumerate(found.values())))}
    for share, number in shares.items():
        _share(axes, share, INK if len(shares) == 1 else PALETTE[number % len(PALETTE)])


def _share(axes: Axes, tokens: float, color: str) -> None:
    axes.axhline(tokens, color=color, linestyle="--", linewidth=1.2, label=f"even share: {tokens:,.0f} tokens")


def _grey(axes: Axes, layers: set[int]) -> None:
    for number, layer in enumerate(sorted(layers)):
        label = None if number else "left alone (sliding window)"
        axes.axvspan(layer - 0.5, layer + 0.5, facecolor=PALE, edgecolor=GREY, hatch="//", alpha=0.5, lw=0, label=label)
