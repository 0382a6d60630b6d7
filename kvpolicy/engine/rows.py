"""Rows of a layer that come and go: each has slots from the beginning, and takes over the contents of another layer.

The other layer has one row. What it holds is copied bit for bit to the slots of a free row, where slots of the same
part, the full-precision buffer or a stage, keep their order. No tensor is replaced, so that a compiled step goes on,
but where a row needs more slots than the layer was made with.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvpolicy.engine.due_rows import Rows, only_rows
from kvpolicy.engine.layer_contents import LayerContents, RowRoom
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.page_geometry import PageGeometry
from kvpolicy.engine.page_rows import PageRows
from kvpolicy.engine.slot_rows import SlotRows


class RowSlots(Protocol):
    """The slots of a layer whose rows come and go. What works on one row is called while the layer has no other."""

    def begin(self, tokens: int) -> None:
        """Make slots for `tokens` in every row; there are none before."""
        ...

    def widen(self, tokens: int) -> None:
        """Add slots to all rows, so that one may have `tokens`."""
        ...

    def fit(self, other: LayerStore) -> bool:
        """Arrange slots so that a row can take over a layer of one row; returns whether any was moved."""
        ...

    def set_budgets(self, budget: Tensor) -> None:
        """Let each row hold `budget` [B] tokens, in the tensors that are there."""
        ...

    def holds(self, other: LayerStore, tokens: int) -> bool:
        """Whether a row with slots for `tokens` has all slots of a layer of one row that it needs."""
        ...

    def take(self, other: LayerStore, tokens: int) -> RowRoom:
        """Copy what a layer of one row holds to the one row; returns what this has room for, `tokens` or more."""
        ...

    def note(self, row: int, other: LayerStore) -> None:
        """Note, of a row that has taken over a layer, what is kept on the host."""
        ...

    def fill_index(self) -> None:
        """Make the reader's index of the one row."""
        ...

    def empty(self) -> None:
        """Empty the one row, as it was before its first token."""
        ...

    def free(self, row: int) -> None:
        """Note, of a row that was emptied, what is kept on the host."""
        ...


def begin_rows(store: LayerStore, like: LayerStore, count: int, room: RowRoom) -> None:
    """Let an empty layer have `count` free rows, with the shape, dtype and device of another one.

    Args:
        store: The layer.
        like: The other layer, with the same parts.
        count: Number of rows.
        room: What each of them has room for.
    """
    own = like.contents
    shape = own.shape
    dtype = own.tensors.keys.dtype
    empty = torch.empty(count, shape.heads, 0, shape.head_dim, dtype=dtype, device=own.tensors.device)
    store.initialize(empty, own.ranks, shape.group, shape.value_dim)
    layer = store.contents
    layer.scale = own.scale
    layer.room = room
    slots = _slots_of(store)
    slots.begin(room.tokens)
    slots.set_budgets(layer.tensors.budget.new_full((count,), room.budget))
    store.geometry.fix_addresses()
    store.recount()


def needed_tokens(other: LayerStore, end: int, *, is_announced: bool) -> int:
    """Tokens that a row must have slots for to take over a layer of one row.

    Args:
        other: The layer.
        end: The most tokens that the row ever has.
        is_announced: Whether the layer was made for the tokens that follow; else there are to be slots for all of them.
    """
    layer = other.contents
    expected = layer.expected_len[0]
    if not is_announced and other.spec.grows:
        expected += other.geometry.tokens_lacking(end - int(layer.tensors.length))[0]
    elif not is_announced:
        expected = max(expected, int(layer.tensors.budget))
    return min(expected, end)


def obstacle(store: LayerStore, other: LayerStore) -> str:
    """What keeps a row from taking over a layer of one row, as a clause behind "got"; empty if nothing does."""
    mine = store.contents
    own = other.contents
    where = f"in layer {store.layer_idx}"
    if mine.shape != own.shape:
        return f"one with {own.shape} {where} instead of {mine.shape}"
    held = mine.tensors.keys
    new = own.tensors.keys
    if (held.dtype, mine.tensors.device) != (new.dtype, own.tensors.device):
        return f"one in {new.dtype} on {own.tensors.device} {where} instead of {held.dtype} on {mine.tensors.device}"
    return ""


def widen(store: LayerStore, other: LayerStore, tokens: int) -> bool:
    """Add slots to all rows where one lacks them to take over `other`; returns whether any were added."""
    slots = _slots_of(store)
    changes = slots.fit(other)
    if tokens > store.contents.capacity:
        slots.widen(tokens)
        changes = True
    if changes:
        store.recount()
    return changes


def holds(store: LayerStore, other: LayerStore, tokens: int) -> bool:
    """Whether a row of a layer with slots for `tokens` has all slots of a layer of one row that it needs."""
    return _slots_of(store).holds(other, tokens)


def put_row(store: LayerStore, row: int, other: LayerStore, tokens: int) -> None:
    """Copy what a layer of one row holds to a free row.

    Args:
        store: The layer.
        row: The row.
        other: The other layer; it is not changed.
        tokens: Tokens that the row has slots for, from `needed_tokens`, no more than there are slots.
    """
    layer = store.contents
    own = other.contents
    layer.scale = own.scale
    slots = _slots_of(store)
    with only_rows(layer, _one(row)):
        room = slots.take(other, tokens)
    _settle(store, row, room, own)
    slots.note(row, other)
    with only_rows(layer, _one(row)):
        slots.fill_index()
    store.demote()
    layer.note_slots()


def drop_row(store: LayerStore, row: int) -> None:
    """Let a row hold nothing, and have the room of a free one."""
    layer = store.contents
    assert layer.room is not None, "only rows that come can go"
    slots = _slots_of(store)
    with only_rows(layer, _one(row)):
        slots.empty()
    _settle(store, row, layer.room, None)
    slots.free(row)
    store.recount()


def _settle(store: LayerStore, row: int, room: RowRoom, own: LayerContents | None) -> None:
    """Set the numbers of a row on the host, and what follows from them; `own` is the layer that it has taken over."""
    layer = store.contents
    tensors = layer.tensors
    layer.expected_len[row] = room.tokens
    steps = 0 if own is None else own.steps_unsorted[0]
    layer.steps_unsorted = [*layer.steps_unsorted[:row], steps, *layer.steps_unsorted[row + 1 :]]
    budget = tensors.budget.clone()
    budget[row] = room.budget
    _slots_of(store).set_budgets(budget)
    ranked = 0 if own is None else own.schedule.ranked_len[0]
    layer.schedule.replace(row, ranked, tensors.length, tensors.budget)


def _slots_of(store: LayerStore) -> RowSlots:
    layer = store.contents
    if store.slots is not None:
        return SlotRows(layer, store.slots)
    assert isinstance(store.geometry, PageGeometry), "slots are in pages, or equally many in all heads"
    return PageRows(layer, store.geometry)


def _one(row: int) -> Rows:
    return Rows([row], slice(row, row + 1))
