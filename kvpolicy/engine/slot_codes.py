"""The slots of a layer as they are read: a full-precision buffer, and behind it the codec's stages."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.columns import CodedColumns, StageColumns
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.row_limits import has_dictionary
from kvpolicy.engine.state import map_slots, map_state
from kvpolicy.engine.token_batch import SlotData
from kvpolicy.kernels.rotary import SlotRotary
from kvpolicy.protocols.codec import NO_STATISTICS, StageStore
from kvpolicy.statistics.windows import Past


class SlotCodes:
    """Reads the full-precision buffer and the stages of a layer. Nothing here changes a slot."""

    def __init__(self, layer: LayerContents) -> None:
        """Read the slots of `layer`."""
        self._layer = layer

    def view(self) -> CodedColumns | None:
        """The coded slots as a decode step attends to them; None if there are none."""
        layer = self._layer
        tensors = layer.tensors
        rope = layer.spec.key_rope
        columns: list[StageColumns] = []
        start = layer.layout.exact
        for stage, size in enumerate(layer.layout.coded):
            if size:
                rotary = None
                if rope is not None and tensors.limits is not None:
                    positions = tensors.positions[..., start : start + size]
                    rotary = SlotRotary(rope, positions, layer.length - 1, tensors.limits.rope_offset)
                columns.append(StageColumns(layer.spec.stages[stage], self.stage_store(stage), rotary, size, start))
                start += size
        return CodedColumns(columns) if columns else None

    def past(self) -> Past | None:
        """Every slot, decoded; None if there are none."""
        tensors = self._layer.tensors
        if not self._layer.layout.slots:
            return None
        if tensors.host:  # without stages, so that one copy is enough
            keys, values = (t.to(tensors.device, copy=True) for t in (tensors.keys, tensors.values))
            return Past(keys, values, tensors.positions >= 0, tensors.log_counts)
        coded = self.view()
        parts = [(tensors.keys, tensors.values), *(coded.read(tensors.keys.dtype) if coded is not None else ())]
        keys = torch.cat([pair[0] for pair in parts], 2)
        values = torch.cat([pair[1] for pair in parts], 2)
        return Past(keys, values, tensors.positions >= 0, tensors.log_counts)

    def stage_slots(self, stage: int) -> slice:
        """The slots of a stage."""
        layout = self._layer.layout
        start = layout.starts()[stage]
        return slice(start, start + layout.coded[stage])

    def stage_store(self, stage: int) -> StageStore:
        """The tensors of a stage, as the codec takes them."""
        layer = self._layer
        tensors = layer.tensors
        limits = tensors.limits
        kept = NO_STATISTICS
        if limits is not None and limits.statistics:
            kept = dict(zip(map(type, layer.spec.codec_statistics), limits.statistics, strict=True))
        atoms = self.atoms() if layer.reserved else None
        shared = None if layer.group is None else layer.group.shared(stage)
        return StageStore(tensors.codes[stage], layer.calibrations[stage], atoms, kept, shared=shared)

    def atoms(self) -> tuple[Tensor, Tensor] | None:
        """Keys, in the codec's key space, and values of the dictionary slots, [B, H, W, D]; 0 for an empty slot."""
        tensors = self._layer.tensors
        reserved = self._layer.reserved
        if not reserved or tensors.limits is None:
            return None
        # By pins and not by positions: codes refer to an atom even after its own token was evicted.
        pins = tensors.limits.pins
        empty = (pins < 0)[..., None]
        keys = tensors.keys[:, :, :reserved].masked_fill(empty, 0)
        values = tensors.values[:, :, :reserved].masked_fill(empty, 0)
        return self.in_key_space(keys, pins).to(keys.dtype), values

    def in_key_space(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys [B, H, n, D] at positions [B, H, n] in the codec's key space."""
        rope = self._layer.spec.key_rope
        limits = self._layer.tensors.limits
        if rope is None or limits is None:
            return keys
        return rope.unrotate(keys, positions + limits.rope_offset[:, None, None])

    def open_slots(self) -> Tensor:
        """Slots of the full-precision buffer that any token may take, [B or 1, 1, E] bool: all but dictionary slots."""
        layer = self._layer
        tensors = layer.tensors
        limits = tensors.limits
        reserved = layer.reserved
        slots = torch.arange(layer.layout.exact, device=tensors.positions.device)[None, None]
        if not reserved or limits is None:
            return slots >= 0
        return (slots >= reserved) | ~has_dictionary(limits)

    def buffered(self) -> Tensor:
        """Tokens of each head in the full-precision buffer, the dictionary left out, [B, H]."""
        positions = self._layer.tensors.positions[..., : self._layer.layout.exact]
        return ((positions >= 0) & self.open_slots()).sum(-1)

    def buffer(self) -> SlotData:
        """The full-precision buffer; its keys and values may be shorter until a prompt is placed."""
        tensors = self._layer.tensors
        exact = self._layer.layout.exact
        state = map_slots(lambda t: t[..., :exact], tensors.state)
        counts = map_state(lambda t: t[..., :exact], tensors.counts)
        return SlotData(tensors.keys, tensors.values, tensors.positions[..., :exact], state, counts)
