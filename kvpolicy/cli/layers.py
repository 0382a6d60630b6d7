"""A plan's layers as a table, those that are alike in one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvpolicy.cli.printing import size, table

MOST = 16
"""Lines of a table; of more, the middle is left out."""


def layer_facts(planned: Any) -> list[dict[str, Any]]:
    """Each layer of a `CachePlan` as JSON."""
    facts: list[dict[str, Any]] = [
        {
            "layer": layer.layer_idx,
            "tokens": layer.tokens,
            "exact_slots": layer.layout.exact,
            "coded_slots": list(layer.layout.coded),
            "bytes": dict(layer.nbytes) | {"total": sum(layer.nbytes.values())},
        }
        for layer in planned.layers
    ]
    alone = [{"layer": index, "left_alone": True, "bytes": {"total": n}} for index, n in planned.left_alone.items()]
    return sorted([*facts, *alone], key=lambda layer: layer["layer"])


def layer_table(layers: Sequence[dict[str, Any]], full: int) -> str:
    """Tokens, slots and bytes per layer.

    Args:
        layers: What `layer_facts` says.
        full: Of a layer under the policy, the bytes of the full cache.
    """
    rows = [("layers", "tokens", "exact", "coded", "bytes", "of full")]
    rows += [(ranges(indices), *_cells(dict(facts), full)) for facts, indices in _folded(layers)]
    if len(rows) > MOST + 1:
        half = MOST // 2
        left = f"{len(rows) - 1 - 2 * half} more"
        rows[half + 1 : -half] = [(left, "", "", "", "", "")]
    return table(rows)


def _cells(facts: dict[str, Any], full: int) -> tuple[str, ...]:
    if "tokens" not in facts:  # its own full cache is all that it holds
        return ("window", "", "", size(facts["total"]), "")
    share = f"{facts['total'] / full:.3f}" if full else ""
    coded = "+".join(f"{n:,}" for n in facts["coded"]) or "0"
    return (f"{facts['tokens']:,}", f"{facts['exact']:,}", coded, size(facts["total"]), share)


def _folded(layers: Iterable[dict[str, Any]]) -> list[tuple[tuple[tuple[str, Any], ...], list[int]]]:
    alike: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for layer in layers:
        facts: dict[str, Any] = {"total": layer["bytes"]["total"]}
        if "tokens" in layer:
            facts |= {"tokens": layer["tokens"], "exact": layer["exact_slots"], "coded": tuple(layer["coded_slots"])}
        alike.setdefault(tuple(facts.items()), []).append(layer["layer"])
    return list(alike.items())


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, neighbours joined; where they are scattered, how many there are.

    >>> ranges([0, 1, 2, 5]), ranges([3]), ranges([1, 3, 5, 7])
    ('0-2, 5', '3', '4 of 1-7')
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    if len(parts) > 3:
        return f"{len(numbers)} of {numbers[0]}-{numbers[-1]}"
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
