"""Writes to the slots of a layer, in place: every change of a slot in a decode step goes through here."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.layer_group import Block
from kvpolicy.engine.layer_index import LayerIndex
from kvpolicy.engine.link import Link
from kvpolicy.engine.slot_codes import SlotCodes
from kvpolicy.engine.state import slot_tensors
from kvpolicy.engine.token_batch import SlotData
from kvpolicy.engine.undo_log import Targets, UndoLog
from kvpolicy.kernels.slot_writes import flat_slots, gather_slots, needs_no_index, write_slots


class SlotWriter:
    """Writes tokens to the full-precision buffer and to the stages of a layer."""

    def __init__(self, layer: LayerContents, codes: SlotCodes, index: LayerIndex) -> None:
        """Write to the slots of `layer`, and let `index` know."""
        self._layer = layer
        self._codes = codes
        self._index = index

    def write(self, slots: Tensor, data: SlotData | None, mask: Tensor | None, stage: int | None = None) -> None:
        """Write tokens to slots, or empty slots, in place.

        Args:
            slots: Slots of each head, [B, H, n] int64, counted from the first slot, or from the first one of `stage`.
            data: The tokens, keys in the codec's key space if they are coded; None to empty the slots.
            mask: Which of the slots are written, [B, H, n] bool; None for all.
            stage: The stage that codes the tokens; None for the full-precision buffer.
        """
        layer = self._layer
        tensors = layer.tensors
        undo = layer.undo
        index: Tensor | None = None  # found once for all tensors with equally many slots
        if data is None:
            slots = slots if stage is None else slots + self._codes.stage_slots(stage).start
            nothing = torch.full_like(slots, -1, dtype=torch.int32)
            write_masked("emptied", tensors.positions, slots, nothing, mask, undo)
            if tensors.reads:
                self._index.refresh_slots(slots, stage, emptied=True)
            return
        if stage is None:
            if layer.spec.host:
                self._store_vectors(slots, data, mask)
            else:
                if not needs_no_index(tensors.keys, slots):
                    index = layer.memo.once(flat_slots, slots, tensors.keys.shape[2], layer.memo.once)
                write_masked("keys", tensors.keys, slots, data.keys, mask, undo, index)
                write_masked("values", tensors.values, slots, data.values, mask, undo, index)
        else:
            assert mask is not None
            at = self._codes.stage_slots(stage)
            # Read before the new positions are written: codecs fit parameters where a head or a group was empty.
            occupied = tensors.positions[..., at] >= 0
            if layer.group is None:
                store = self._codes.stage_store(stage)
                layer.spec.stages[stage].write(store, data.keys, data.values, slots, mask, occupied)
            else:
                store_of = partial(self._codes.stage_store, stage)
                block = Block(stage, store_of, data.keys, data.values, slots, mask, occupied)
                layer.group.write(layer.number, block)
            slots = slots + at.start
        if layer.layout.exact != layer.layout.slots:
            index = None  # numbers are scattered, which needs none
        write_masked("positions", tensors.positions, slots, data.positions, mask, undo, index)
        pairs = zip(slot_tensors((tensors.state, tensors.counts)), slot_tensors((data.state, data.counts)), strict=True)
        for number, (target, item) in enumerate(pairs):
            write_masked(f"state.{number}", target, slots, item, mask, undo, index)
        if tensors.reads:
            self._index.refresh_slots(slots, stage)

    def _store_vectors(self, slots: Tensor, data: SlotData, mask: Tensor | None) -> None:
        """Write keys and values of tokens to host memory."""
        layer = self._layer
        host = layer.tensors.keys.device
        there = slots.to(host)
        mask = None if mask is None else mask.to(host)
        for name, target, item in (
            ("keys", layer.tensors.keys, data.keys),
            ("values", layer.tensors.values, data.values),
        ):
            layer.link.count_stored(target, slots.shape[-1])
            write_masked(name, target, there, item.to(host), mask, layer.undo)

    def count_stored(self, link: Link) -> None:
        """Count on `link` what a decode step writes to host memory, of tensors that may be on the device meta."""
        tensors = self._layer.tensors
        for target in (tensors.keys, tensors.values):
            link.count_stored(target, self._written)

    @property
    def _written(self) -> int:
        """Slots of each head that a decode step writes."""
        return 2 if self._layer.spec.merges_in_steps else 1

    def step_targets(self) -> Targets:
        """The tensors that a decode step writes to, by name, and the slots of each head."""
        layer = self._layer
        tensors = layer.tensors
        written = self._written
        targets = {"keys": tensors.keys, "values": tensors.values, "positions": tensors.positions}
        targets |= {f"state.{n}": t for n, t in enumerate(slot_tensors((tensors.state, tensors.counts)))}
        evicts = sum(layer.layout.coded) > 0 and not layer.spec.grows
        # Before "positions": the slot of an evicted token is emptied before the new one is written.
        emptied = {"emptied": (tensors.positions, 1)} if evicts else {}
        return emptied | {name: (target, written) for name, target in targets.items()}


def write_masked(
    name: str,
    target: Tensor,
    slots: Tensor,
    data: Tensor,
    mask: Tensor | None,
    undo: UndoLog | None,
    index: Tensor | None = None,
) -> None:
    """Write data to slots of a tensor, in place, after what they hold was recorded.

    Args:
        name: The name of the tensor in the undo log.
        target: [B, H, S, ...].
        slots: Slots of each head, [B, H, n] int64.
        data: [B, H, n, ...].
        mask: Which of the slots are written, [B, H, n] bool; None for all.
        undo: The undo log of the layer, if steps are recorded.
        index: See `write_slots`.
    """
    if mask is not None:
        # A masked token writes back what its slot holds. This is safe because `slots` are distinct within a head,
        # masked or not, or have the same data and mask: a masked duplicate of a written slot could undo the write.
        written = mask.reshape(*mask.shape, *(1,) * (target.dim() - 3))
        data = torch.where(written, data, gather_slots(target, slots))
    if undo is not None:
        undo.record(name, target, slots)
    write_slots(target, slots, data, index)
