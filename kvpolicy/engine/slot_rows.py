"""Rows that come and go in a layer with equally many slots in every head; see `kvpolicy.engine.rows`."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kvpolicy.engine.layer_contents import LayerContents, RowRoom
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.layer_tensors import alloc_index
from kvpolicy.engine.row_limits import RowLimits, alloc_limits
from kvpolicy.engine.slot_geometry import SlotGeometry
from kvpolicy.engine.state import map_slots, slot_tensors
from kvpolicy.engine.state import tensors as all_tensors
from kvpolicy.protocols import State


class SlotRows:
    """The rows of a layer in which all heads have equally many slots; see `RowSlots`."""

    def __init__(self, layer: LayerContents, slots: SlotGeometry) -> None:
        """Fill and empty rows of `layer`, arranged as `slots`."""
        self._layer = layer
        self._slots = slots

    def begin(self, tokens: int) -> None:
        """Make slots for `tokens` in every row; there are none before."""
        self._slots.begin_rows(tokens)

    def widen(self, tokens: int) -> None:
        """Add slots to all rows, so that one may have `tokens`."""
        self._slots.widen(tokens)

    def set_budgets(self, budget: Tensor) -> None:
        """Let each row hold `budget` [B] tokens, in the tensors that are there."""
        self._slots.set_row_budgets(budget)

    def fit(self, other: LayerStore) -> bool:
        """Nothing: all slots are alike."""
        return False

    def holds(self, other: LayerStore, tokens: int) -> bool:
        """Whether a row has every slot in which a layer of one row holds a token."""
        own = other.contents
        spans = [start for _, start in _spans(self._layer, own)]
        if sum(start.stop - start.start for start in spans) == own.layout.slots:
            return True
        left = own.tensors.positions.clone()
        for start in spans:
            left[..., start] = -1
        return not bool((left >= 0).any())

    def empty(self) -> None:
        """Empty the layer, which has one row, as it was before its first token."""
        layer = self._layer
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

    def take(self, other: LayerStore, tokens: int) -> RowRoom:
        """Copy what a layer of one row holds to this one, which has one row too, with slots for `tokens` of it."""
        layer = self._layer
        own = other.contents
        self.empty()
        tensors = layer.tensors
        theirs = own.tensors
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
        budget = int(theirs.budget)
        return RowRoom(tokens, max(budget, tokens) if layer.spec.grows else budget)

    def note(self, row: int, other: LayerStore) -> None:
        """Note what a layer whose contents a row has taken over knows of its reader."""
        index = self._slots.index
        theirs = None if other.slots is None else other.slots.index
        if index.shape is not None and theirs is not None:
            index.same_slots = index.same_slots and (theirs.shape is None or theirs.same_slots)

    def fill_index(self) -> None:
        """Make the index of the layer, which has one row."""
        if self._slots.index.shape is not None:
            self._slots.index.fill()

    def free(self, row: int) -> None:
        """Nothing more of a row that was emptied."""


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
        first = held[:, :, :count]
        part = new[:, :, :count]
        if first.shape == part.shape:  # else it is found again
            first.copy_(part)


def _beside_slots(state: State) -> list[Tensor]:
    """The tensors of a state that are per head or per row."""
    per_slot = {id(t) for t in slot_tensors(state)}
    return [t for t in all_tensors(state) if id(t) not in per_slot]


def _of_text(limits: RowLimits) -> State:
    """The limits of a row that follow from its text, and not from its budget."""
    return (limits.pins, limits.rope_offset, limits.statistics)
