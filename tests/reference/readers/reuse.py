"""Layers that read what another layer chose."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

DEFAULTS: dict[str, Any] = {"layers": "auto", "every": 4, "dense": "auto", "full": True}
SMALL = "reuse:every=2:dense=0:full=false/exact:read=6"


def chooser(config: dict[str, Any], base_dense: int, layer: int) -> int | None:
    """The layer whose choice a layer reads, itself or an earlier one; None if it reads everything.

    Args:
        config: The parameters.
        base_dense: The first layers in which the base would read everything.
        layer: Index of the layer.
    """
    first = max(2 if config["dense"] == "auto" else config["dense"], base_dense)
    last = None
    for index in range(layer + 1):
        if config["layers"] != "auto":
            if str(index) in config["layers"].split("_"):
                last = index
        elif index >= first and (index - first) % config["every"] == 0:
            last = index
    return last


def followed(order: Sequence[int], held: Collection[int], allowed: int, newest: int) -> set[int]:
    """The positions that one head reads of a layer that does not choose.

    Args:
        order: What the same head of the layer that chooses reads, the most needed first.
        held: Positions that this layer holds.
        allowed: How many of them it may read.
        newest: Position of the newest token.
    """
    read = [newest] if newest in held else []
    for position in order:
        if position in held and position not in read and len(read) < allowed:
            read.append(position)
    return set(read)
