"""The layers of a plan as JSON and as a table, in which layers with equal cells share one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpolicy.cli.formatting import size
from kvpolicy.text.text_tables import text_layer_table


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
    head = ("layers", "tokens", "exact", "coded", "bytes", "of full")
    sizes = {layer["layer"]: layer["bytes"]["total"] for layer in layers}
    return text_layer_table(head, [(layer["layer"], _cells(layer, full)) for layer in layers], nbytes=sizes)


def _cells(layer: dict[str, Any], full: int) -> tuple[str, ...]:
    nbytes: int = layer["bytes"]["total"]
    if "tokens" not in layer:  # an unmanaged layer holds its stock cache, which has no ratio to show
        return ("unmanaged", "", "", size(nbytes), "")
    ratio = f"{nbytes / full:.3f}" if full else ""
    coded = "+".join(f"{slots:,}" for slots in layer["coded_slots"]) or "0"
    return (f"{layer['tokens']:,}", f"{layer['exact_slots']:,}", coded, size(nbytes), ratio)
