"""Block work in the rows of a layer in which it is due: the others take no part in it.

Rows fill their buffers at different steps. So in a batch of many lengths some row is due at each step, and a step would
take as long as the work of all rows.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from kvpolicy.engine.layer_contents import LayerContents

MOST_COPIED = 4
"""Rows that lie apart are copied, no more of a layer at a time than one row of so many, so that copies stay small."""

OF_SLOTS = ("keys", "values", "positions", "state", "counts", "codes", "reads")
"""The parts of a layer that change when tokens move from slot to slot."""


class Rows(NamedTuple):
    """Some rows of a layer.

    Attributes:
        numbers: Which ones, ascending.
        at: The same as an index of tensors: a range, or [n] int64 on the device of the layer.
    """

    numbers: list[int]
    at: slice | Tensor


def due_rows(due: Tensor | None) -> list[Rows]:
    """The rows that are `due` [B] bool, in parts for one `only_rows` each; none for None. Waits for the device, once.

    Examples:
        >>> import torch
        >>> due_rows(torch.tensor([False, True, True, False]))
        [Rows(numbers=[1, 2], at=slice(1, 3, None))]
    """
    if due is None:
        return []
    numbers = [number for number, is_due in enumerate(due.tolist()) if is_due]
    if not numbers or _is_range(numbers):
        return [_part(numbers, None)] if numbers else []
    # Sorted on the device: an index from the host would have to be waited for.
    order = due.byte().argsort(descending=True, stable=True)
    size = -(-len(due) // MOST_COPIED)
    starts = range(0, len(numbers), size)
    return [_part(numbers[start : start + size], order[start : min(start + size, len(numbers))]) for start in starts]


@contextmanager
def only_rows(layer: LayerContents, rows: Rows, written: Collection[str] = OF_SLOTS) -> Generator[None]:
    """Let a layer have no rows but these for a while. What is written to them, in place, is written to the layer.

    The other layers of its group, whose blocks are encoded together with those of this one, have no other rows either.

    Args:
        layer: The layer.
        rows: The rows.
        written: The parts of the layer that are written to; see `LayerTensors.parts`.
    """
    if len(rows.numbers) == len(layer.expected_len):
        yield
        return
    members = [layer] if layer.group is None else [*layer.group.layers.values()]
    whole = [member.tensors for member in members]
    expected_len = layer.expected_len
    for member in members:
        member.tensors = member.tensors.of_rows(rows.at)
    layer.expected_len = [expected_len[number] for number in rows.numbers]
    try:
        yield
        for tensors, member in zip(whole, members, strict=True):
            if not isinstance(rows.at, slice):
                tensors.put_rows(rows.at, member.tensors, written)
    finally:
        layer.expected_len = expected_len
        for tensors, member in zip(whole, members, strict=True):
            member.tensors = tensors


def _part(numbers: list[int], index: Tensor | None) -> Rows:
    """A part of the rows; those of a range are read and written where they are, without a copy."""
    if index is None or _is_range(numbers):
        return Rows(numbers, slice(numbers[0], numbers[-1] + 1))
    return Rows(numbers, index)


def _is_range(numbers: list[int]) -> bool:
    return bool(numbers) and numbers[-1] - numbers[0] + 1 == len(numbers)
