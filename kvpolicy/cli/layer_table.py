"""The layers of a plan as JSON and as a table, in which layers with equal cells share one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvpolicy.cli.formatting import ranges, size, table

MAX_LINES = 16
"""A longer table is shown without its middle."""


def layer_facts(planned: Any) -> list[dict[str, Any]]:
    """Return each layer of a `CachePlan` as a dictionary for JSON, ordered by index."""
    managed: list[dict[str, Any]] = [
        {
            "layer": layer.layer_idx,
            "tokens": layer.tokens,
            "exact_slots": layer.layout.exact,
            "coded_slots": list(layer.layout.coded),
            "bytes": dict(layer.nbytes) | {"total": sum(layer.nbytes.values())},
        }
        for layer in planned.layers
    ]
    unmanaged = [
        {"layer": index, "unmanaged": True, "bytes": {"total": nbytes}} for index, nbytes in planned.unmanaged.items()
    ]
    return sorted([*managed, *unmanaged], key=lambda layer: layer["layer"])


def layer_table(layers: Sequence[dict[str, Any]], full: int) -> str:
    """Format the tokens, slots and bytes of the layers.

    Args:
        layers: The result of `layer_facts`.
        full: Bytes of the full cache of one managed layer.
    """
    rows = [("layers", "tokens", "exact", "coded", "bytes", "of full")]
    rows += [(ranges(indices), *cells) for cells, indices in _grouped(layers, full)]
    if len(rows) > MAX_LINES + 1:
        half = MAX_LINES // 2
        hidden = f"{len(rows) - 1 - 2 * half} more"
        rows[half + 1 : -half] = [(hidden, "", "", "", "", "")]
    return table(rows)


def _cells(layer: dict[str, Any], full: int) -> tuple[str, ...]:
    nbytes: int = layer["bytes"]["total"]
    if "tokens" not in layer:  # an unmanaged layer holds its stock cache, which has no ratio to show
        return ("unmanaged", "", "", size(nbytes), "")
    ratio = f"{nbytes / full:.3f}" if full else ""
    coded = "+".join(f"{slots:,}" for slots in layer["coded_slots"]) or "0"
    return (f"{layer['tokens']:,}", f"{layer['exact_slots']:,}", coded, size(nbytes), ratio)


def _grouped(layers: Iterable[dict[str, Any]], full: int) -> list[tuple[tuple[str, ...], list[int]]]:
    """Return the indices of the layers with equal cells, in the order of their first layer.

    Layers are compared as they are shown: the first one also holds a few bytes for the whole cache.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for layer in layers:
        groups.setdefault(_cells(layer, full), []).append(layer["layer"])
    return list(groups.items())
