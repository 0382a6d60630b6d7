"""Rows of a layer that come and go: each has slots from the beginning, and takes over the contents of another layer.

The other layer has one row. What it holds is copied bit for bit to the slots of a free row, where slots of the same
part, the full-precision buffer or a stage, keep their order. No tensor is replaced, so that a compiled step goes on,
but where a row needs more slots than the layer was made with.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvpolicy.engine.due_rows import Rows, only_rows
from kvpolicy.engine.layer_contents import LayerContents, RowRoom
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.layer_tensors import alloc_index
from kvpolicy.engine.row_limits import RowLimits, alloc_limits
from kvpolicy.engine.slot_geometry import SlotGeometry
from kvpolicy.engine.state import map_slots, slot_tensors
from kvpolicy.engine.state import tensors as all_tensors
from kvpolicy.protocols import State


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
    slots.begin_rows(room.tokens)
    slots.set_row_budgets(layer.tensors.budget.new_full((count,), room.budget))
    slots.fix_addresses()
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
    if not is_announced:
        more = int(layer.tensors.budget)
        if other.spec.grows:
            more = int(other.geometry.tokens_by_head().max()) + end - int(layer.tensors.length)
        expected = max(expected, more)
    return min(expected, end)


def obstacle(store: LayerStore, other: LayerStore) -> str:
    """What keeps a row from taking over a layer of one row, as a clause behind "got"; empty if nothing does."""
    mine = store.contents
    own = other.contents
    where = f"in layer {store.layer_idx}"
    if mine.shape != own.shape:
        return f"one with {own.shape} {where} instead of {mine.shape}"
    held, new = mine.tensors.keys, own.tensors.keys
    if (held.dtype, mine.tensors.device) != (new.dtype, own.tensors.device):
        return f"one in {new.dtype} on {own.tensors.device} {where} instead of {held.dtype} on {mine.tensors.device}"
    return ""


def widen(store: LayerStore, tokens: int) -> None:
    """Add slots to all rows where there are too few for one of `tokens`; nothing else is changed."""
    if tokens > store.contents.capacity:
        _slots_of(store).widen(tokens)
        store.recount()


def fits(store: LayerStore, other: LayerStore) -> bool:
    """Whether the rows of a layer have every slot in which a layer of one row holds a token."""
    own = other.contents
    spans = [start for _, start in _spans(store.contents, own)]
    if sum(start.stop - start.start for start in spans) == own.layout.slots:
        return True
    left = own.tensors.positions.clone()
    for start in spans:
        left[..., start] = -1
    return not bool((left >= 0).any())


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
    with only_rows(layer, _one(row)):
        _copy_slots(layer, own)
    budget = int(own.tensors.budget)
    room = RowRoom(tokens, max(budget, tokens) if store.spec.grows else budget)
    _settle(store, row, room, own.schedule.ranked_len[0], own.steps_unsorted[0])
    index = _slots_of(store).index
    if index.shape is not None:
        theirs = _slots_of(other).index
        index.same_slots = index.same_slots and (theirs.shape is None or theirs.same_slots)
        with only_rows(layer, _one(row)):
            index.fill()
    store.demote()


def drop_row(store: LayerStore, row: int) -> None:
    """Let a row hold nothing, and have the room of a free one."""
    layer = store.contents
    assert layer.room is not None, "only rows that come can go"
    with only_rows(layer, _one(row)):
        _empty_slots(layer)
    _settle(store, row, layer.room, 0, 0)
    store.recount()


def _settle(store: LayerStore, row: int, room: RowRoom, ranked_len: int, steps_unsorted: int) -> None:
    """Set the numbers of a row on the host, and what follows from them."""
    layer = store.contents
    tensors = layer.tensors
    layer.expected_len[row] = room.tokens
    layer.steps_unsorted = [*layer.steps_unsorted[:row], steps_unsorted, *layer.steps_unsorted[row + 1 :]]
    budget = tensors.budget.clone()
    budget[row] = room.budget
    _slots_of(store).set_row_budgets(budget)
    layer.schedule.replace(row, ranked_len, tensors.length, tensors.budget)


def _slots_of(store: LayerStore) -> SlotGeometry:
    assert store.slots is not None, "rows of pages are not here"
    return store.slots


def _one(row: int) -> Rows:
    return Rows([row], slice(row, row + 1))


def _empty_slots(layer: LayerContents) -> None:
    """Empty a layer of one row, as it was before its first token."""
    tensors = layer.tensors
    spec = layer.spec
    heads = layer.shape.heads
    device = tensors.device
    tensors.positions.fill_(-1)
    tensors.length.zero_()
    state = spec.selector.alloc(1, heads, 0, device, layer.shape.head)
    _copy(tensors.state, map_slots(lambda t: t.new_zeros(1, heads, tensors.positions.shape[-1]), state))
    for part in (tensors.keys, tensors.values, *all_tensors(tensors.counts)):
        part.zero_()
    _copy(tensors.merged, spec.merger.alloc(1, heads, device))
    dim = tensors.keys.shape[-1]
    for number, codes in enumerate(tensors.codes):
        _copy(codes, spec.stages[number].alloc(1, heads, layer.layout.coded[number], dim, device))
    limits = alloc_limits(spec.codec, 1, heads, dim, device)
    if limits is not None and tensors.limits is not None:
        _copy(_of_text(tensors.limits), _of_text(limits))
    if tensors.reads:
        fresh = alloc_index(spec, 1, layer.shape, layer.layout, device)
        _copy(tensors.reads[1:], fresh[1:])  # but for the limit, which follows from the budget


def _copy_slots(layer: LayerContents, own: LayerContents) -> None:
    """Copy what one layer of one row holds to another one, whose slots are at least as many."""
    _empty_slots(layer)
    tensors, theirs = layer.tensors, own.tensors
    tensors.length.copy_(theirs.length)
    spans = [*_spans(layer, own)]
    per_slot = ((tensors.positions, tensors.state, tensors.counts), (theirs.positions, theirs.state, theirs.counts))
    for target, source in zip(*map(slot_tensors, per_slot), strict=True):
        for to, start in spans:
            target[..., to] = source[..., start]
    for target, source in zip(_beside_slots(tensors.state), _beside_slots(theirs.state), strict=True):
        target.copy_(source)
    exact = min(tensors.keys.shape[2], theirs.keys.shape[2])
    for target, source in ((tensors.keys, theirs.keys), (tensors.values, theirs.values)):
        target[:, :, :exact] = source[:, :, :exact]
    _copy(tensors.merged, theirs.merged)
    for codes, source in zip(tensors.codes, theirs.codes, strict=False):
        _carry(codes, source)
    if tensors.limits is not None and theirs.limits is not None:
        _copy(_of_text(tensors.limits), _of_text(theirs.limits))
    if tensors.reads and theirs.reads:
        _carry(tensors.reads.index, theirs.reads.index)
        _copy(tensors.reads.rope_offset, theirs.reads.rope_offset)


def _spans(layer: LayerContents, own: LayerContents) -> Iterator[tuple[slice, slice]]:
    """Where the slots of each part of one layer go in another one: its first slots, where it has more."""
    parts = zip(
        zip((0, *layer.layout.starts()), (layer.layout.exact, *layer.layout.coded), strict=True),
        zip((0, *own.layout.starts()), (own.layout.exact, *own.layout.coded), strict=True),
        strict=False,  # the layout of a row with few tokens has no stages
    )
    for (to, size), (start, held) in parts:
        count = min(size, held)
        yield slice(to, to + count), slice(start, start + count)


def _copy(target: State, source: State) -> None:
    """Copy every tensor of a state to one of the same structure and sizes."""
    for held, new in zip(all_tensors(target), all_tensors(source), strict=True):
        held.copy_(new)


def _carry(target: State, source: State) -> None:
    """The same with tensors that may have fewer or more entries in the third dimension: the first ones are copied."""
    for held, new in zip(all_tensors(target), all_tensors(source), strict=True):
        if held.dim() < 3:
            held.copy_(new)
            continue
        count = min(held.shape[2], new.shape[2])
        first, part = held[:, :, :count], new[:, :, :count]
        if first.shape == part.shape:  # else it is found again
            first.copy_(part)


def _beside_slots(state: State) -> list[Tensor]:
    """The tensors of a state that are per head or per row."""
    per_slot = {id(t) for t in slot_tensors(state)}
    return [t for t in all_tensors(state) if id(t) not in per_slot]


def _of_text(limits: RowLimits) -> State:
    """The limits of a row that follow from its text, and not from its budget."""
    return (limits.pins, limits.rope_offset, limits.statistics)
