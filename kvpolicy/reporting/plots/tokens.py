"""The positions that each layer holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvpolicy.reporting.plots._style import SEQUENTIAL, canvas, figure_of, whole_numbers
from kvpolicy.reporting.plots.heat import field
from kvpolicy.reporting.report import cache_of
from kvpolicy.reporting.sources import CacheSource, HandleSource
from kvpolicy.text.validation import check_index

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
