"""Bytes of a layer's tensors by kind, those in host memory apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from kvpolicy.engine.state import fields, tensors

HOST = "host"
"""The kind of the bytes of keys and values in host memory."""


def bytes_by_kind(
    exact: Iterable[Tensor],
    codes: Iterable[Any],
    positions: Tensor,
    state: Any,
    counters: Iterable[Tensor],
    merged: Any = (),
    reads: Any = (),
) -> dict[str, int]:
    """Bytes of one layer's tensors: exact, codes, scales, positions, statistics, index, counters, and counts if any.

    Args:
        exact: Keys and values in full precision.
        codes: The codes of each stage, (nested) NamedTuples; the names of their fields tell scales and zero points.
        positions: Positions of the slots.
        state: The selector's state.
        counters: Lengths, budgets and limits of the rows.
        merged: The counts of the slots, and the merger's state.
        reads: The `ReadState` of a layer that may read less than everything.
    """
    kinds = {"exact": sum(t.nbytes for t in exact), "codes": 0, "scales": 0}
    for stage in codes:
        for name, tensor in fields(stage):
            kinds["scales" if "scale" in name or "zero" in name else "codes"] += tensor.nbytes
    kinds["positions"] = positions.nbytes
    kinds["statistics"] = sum(t.nbytes for t in tensors(state))
    kinds["index"] = sum(t.nbytes for t in tensors(reads))
    kinds["counters"] = sum(t.nbytes for t in counters)
    if counts := sum(t.nbytes for t in tensors(merged)):
        kinds["counts"] = counts
    return kinds
