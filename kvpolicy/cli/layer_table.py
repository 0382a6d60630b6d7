"""The layers of a plan as JSON and as a table, in which identical layers share one line."""

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
        {"layer": index, "left_alone": True, "bytes": {"total": nbytes}} for index, nbytes in planned.left_alone.items()
    ]
    return sorted([*managed, *unmanaged], key=lambda layer: layer["layer"])


def layer_table(layers: Sequence[dict[str, Any]], full: int) -> str:
    """Format the tokens, slots and bytes of the layers.

    Args:
        layers: The result of `layer_facts`.
        full: Bytes of the full cache of one managed layer.
    """
    rows = [("layers", "tokens", "exact", "coded", "bytes", "of full")]
    rows += [(ranges(indices), *_cells(dict(facts), full)) for facts, indices in _grouped(layers)]
    if len(rows) > MAX_LINES + 1:
        half = MAX_LINES // 2
        hidden = f"{len(rows) - 1 - 2 * half} more"
        rows[half + 1 : -half] = [(hidden, "", "", "", "", "")]
    return table(rows)


def _cells(facts: dict[str, Any], full: int) -> tuple[str, ...]:
    if "tokens" not in facts:  # an unmanaged layer holds its stock cache, which has no ratio to show
        return ("unmanaged", "", "", size(facts["total"]), "")
    ratio = f"{facts['total'] / full:.3f}" if full else ""
    coded = "+".join(f"{slots:,}" for slots in facts["coded"]) or "0"
    return (f"{facts['tokens']:,}", f"{facts['exact']:,}", coded, size(facts["total"]), ratio)


def _grouped(layers: Iterable[dict[str, Any]]) -> list[tuple[tuple[tuple[str, Any], ...], list[int]]]:
    """Return the indices of the layers with equal tokens, slots and bytes, in the order of their first layer."""
    groups: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for layer in layers:
        facts: dict[str, Any] = {"total": layer["bytes"]["total"]}
        if "tokens" in layer:
            facts |= {"tokens": layer["tokens"], "exact": layer["exact_slots"], "coded": tuple(layer["coded_slots"])}
        groups.setdefault(tuple(facts.items()), []).append(layer["layer"])
    return list(groups.items())
