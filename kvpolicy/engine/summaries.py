"""Summaries of the values of a layer, by which its reader estimates what a step does not read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.link import Link
from kvpolicy.engine.reading import Chosen, ReadShape, ReadState, chooses, entries_of, entry_slots, value_codes
from kvpolicy.engine.slot_codes import SlotCodes
from kvpolicy.kernels.mixed_values import mixed_values
from kvpolicy.protocols import Estimated

Reads = ReadState | tuple[()]


class Summaries:
    """Keeps the part of a reader's index that is computed from values; see `Estimates`.

    Attributes:
        size: Entries of a block, whose values are summarized together; 0 if the layer estimates nothing.
    """

    def __init__(self, layer: LayerContents, codes: SlotCodes) -> None:
        """Read the slots of `layer`, whose coded ones `codes` reads."""
        self._layer = layer
        self._codes = codes
        estimates = layer.spec.reader_traits.estimates
        has_some = estimates is not None and chooses(layer.spec.reader, layer.spec.layer_idx)
        self._estimates: Any = estimates
        self.size: int = self._estimates.block if has_some else 0

    def estimate(self, chosen: Chosen, normalizer: Tensor) -> Estimated:
        """Slots that stand for the entries that were not chosen; see `Estimates.estimate_rest`."""
        reads: Any = self._layer.tensors.reads
        found: Any = chosen
        read = torch.zeros_like(found.scores[:, :, 0], dtype=torch.bool).scatter(-1, found.entries, found.read)
        return self._estimates.estimate_rest(reads.index, found.scores, read, normalizer)

    def rebuild(self, shape: ReadShape, reads: Reads, most: int) -> None:
        """Recompute all summaries, from `most` slots of each head at a time."""
        if not self.size:
            return
        batch, heads = self._layer.tensors.positions.shape[:2]
        blocks = -(-shape.entries // self.size)
        step = max(most // (shape.page * self.size), 1)
        for start in range(0, blocks, step):
            some = torch.arange(start, min(start + step, blocks), device=self._layer.tensors.keys.device)
            self._refresh(shape, reads, some.expand(batch, heads, -1))

    def refresh(self, shape: ReadShape, reads: Reads, entries: Tensor) -> None:
        """Recompute the summaries of entries [B, H, n]."""
        if self.size:
            self._refresh(shape, reads, entries.div(self.size, rounding_mode="floor"))

    def refresh_emptied(self, shape: ReadShape, reads: Reads, slots: Tensor) -> None:
        """Recompute the summaries of slots [B, H, n] of the layer, some of which were emptied and may be coded."""
        # What an index holds of an empty slot alone is never read, but a summary is of other slots too.
        if not self.size:
            return
        self.count_coded(self._layer.link, shape, slots.shape[-1])
        entries = torch.zeros_like(slots)  # of slots of the full-precision buffer any, since they have none
        for part, (start, _) in enumerate(shape.parts):
            entries = torch.where(slots >= start, entries_of(shape, part, slots - start), entries)
        self.refresh(shape, reads, entries)

    def count_coded(self, link: Link, shape: ReadShape, blocks: int) -> None:
        """Count on `link` the decoding of the values of `blocks` blocks of each head."""
        layer = self._layer
        slots = shape.page * self.size * blocks
        for codes, size in zip(layer.tensors.codes, layer.layout.coded, strict=True):
            if size:
                group_size = layer.spec.codec_traits.group_size
                link.count_stage(value_codes(codes), size, min(slots, size), group_size, shape.page)

    def _refresh(self, shape: ReadShape, reads: Reads, blocks: Tensor) -> None:
        """Recompute the summaries of blocks [B, H, n] from the values that their slots hold."""
        if not reads or not reads.index:
            return
        layer = self._layer
        tensors = layer.tensors
        entries = blocks[..., None] * self.size + torch.arange(self.size, device=blocks.device)
        within = entries < shape.entries  # the last block may have fewer
        slots, inside = entry_slots(shape, entries.clamp_max(shape.entries - 1))
        flat = slots.flatten(2)
        coded = self._codes.view()
        if coded is None:
            values = layer.link.rows(mixed_values(tensors.keys, tensors.values), flat)
        else:
            read = coded.values_at if tensors.values.shape[-1] else coded.keys_at
            values = read(flat, tensors.values.dtype)
        occupied = inside & within[..., None] & (tensors.positions.gather(-1, flat) >= 0).view_as(inside)
        self._estimates.summarize(reads.index, blocks, values.unflatten(2, (blocks.shape[2], -1)), occupied.flatten(3))
