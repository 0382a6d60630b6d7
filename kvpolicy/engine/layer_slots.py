"""The slots of a layer as its reader sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.link import Link
from kvpolicy.engine.reading import (
    ReadShape,
    choose,
    entry_slots,
    key_codes,
    largest_counts,
    log_tokens,
    need_of,
    restricted_rows,
    value_codes,
    written_entries,
)
from kvpolicy.engine.reading_in_order import choose_in_order, held_by, slots_of
from kvpolicy.engine.slot_codes import SlotCodes
from kvpolicy.kernels import products as kernels
from kvpolicy.kernels.mixed_values import mixed_values
from kvpolicy.kernels.rotary import KeyRotation, SlotRotary
from kvpolicy.kernels.slot_writes import flat_slots
from kvpolicy.protocols import Products, Read
from kvpolicy.statistics.windows import ScoreTransform

REBUILD_SLOTS = 8192
"""Slots of each head that are decoded at a time when an index is made."""


class LayerSlots:
    """The slots of a layer as its reader sees them; see `kvpolicy.protocols.SlotAccess`."""

    def __init__(
        self,
        layer: LayerContents,
        codes: SlotCodes,
        shape: ReadShape,
        transform: ScoreTransform | None = None,
        scanned: Tensor | None = None,
        link: Link | None = None,
        reads_alike: bool = False,
    ) -> None:
        """Show the slots of a layer.

        Args:
            layer: The layer.
            codes: Reads its coded slots.
            shape: Its read plan.
            transform: From products to attention weights, in a step.
            scanned: The products with every key, if they are known.
            link: Counts what is read; by default that of the layer.
            reads_alike: Whether every row reads as many entries as `shape` says.
        """
        self._layer = layer
        self._codes = codes
        self._shape = shape
        self._transform = transform
        self._link = layer.link if link is None else link
        self._reads_alike = reads_alike
        self.positions = layer.tensors.positions
        self.length = layer.length
        self.ranks = layer.ranks
        self.entries = shape.entries
        self.slots_read = shape.slots
        self.products: Products = KeyProducts(layer, codes, scanned)
        self.memo = layer.memo
        self._in_order = layer.shared is not None and layer.in_order

    # entries and what they hold

    def tiles(self, entries: Tensor | None, block: int = 1) -> Sequence[Tensor]:
        if entries is not None:
            return [entries if block == 1 else entries.div(block, rounding_mode="floor")]
        every = torch.arange(-(-self.entries // block), device=self.positions.device)
        tile = max(REBUILD_SLOTS // (self._shape.page * block), 1)
        return every.expand(*self.positions.shape[:2], -1).split(tile, -1)

    def of_entries(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        if self._in_order:  # the layers of a step write the same slot
            once = self.memo.once
            return once(slots_of, self._shape, entries), once(held_by, self._shape, entries, self.length)
        slots, inside = entry_slots(self._shape, entries)
        at = slots.flatten(2)
        return at, inside & (self.positions.gather(-1, at) >= 0).view_as(inside)

    def entries_of(self, slots: Tensor) -> Tensor:
        entries = torch.zeros_like(slots)
        for part, (start, _) in enumerate(self._shape.parts):
            entries = torch.where(slots >= start, written_entries(self._shape, part, slots), entries)
        return entries

    def keys(self, at: Tensor) -> Tensor:
        tensors = self._layer.tensors
        coded = self._codes.view()
        if coded is not None:
            return coded.keys_at(at, tensors.keys.dtype)
        # Of the written slots alone, so that a memo of the step holds no index of all that layers read.
        index = self.memo.once(flat_slots, at, tensors.keys.shape[2], self.memo.once) if self._in_order else None
        return self._link.rows(tensors.keys, at, index)

    def values(self, at: Tensor) -> Tensor:
        tensors = self._layer.tensors
        coded = self._codes.view()
        if coded is None:
            return self._link.rows(mixed_values(tensors.keys, tensors.values), at)
        self._count_values(at.shape[-1])
        return (coded.values_at if tensors.values.shape[-1] else coded.keys_at)(at, tensors.values.dtype)

    def coordinates(self, vectors: Tensor) -> Tensor:
        basis = self._layer.basis
        return kernels.coordinates(vectors, basis) if isinstance(basis, Tensor) else vectors

    def unrotated(self, keys: Tensor, positions: Tensor) -> Tensor:
        return KeyRotation(self._layer.spec.rope, self._rope_offset).undone(keys, positions)

    def rotated(self, keys: Tensor, positions: Tensor) -> Tensor:
        rope = self._layer.spec.rope
        if rope is None:
            return keys
        return SlotRotary(rope, positions, self.length - 1, self._rope_offset).keys(keys, slice(None))

    @property
    def _rope_offset(self) -> Tensor:
        reads: Any = self._layer.tensors.reads  # not asserted, since a compiler would trace the assertion
        return reads.rope_offset

    # a choice

    def scores(self, raw: Tensor) -> Tensor:
        assert self._transform is not None, "queries are scored in a step"
        return self._transform.finish(raw)

    def log_tokens(self) -> Tensor:
        return log_tokens(self._shape, self._layer.tensors.log_counts, self.positions)

    def best(self, scores: Tensor, sinks: int = 0) -> Read:
        counts = self._layer.tensors.log_counts
        if counts is not None:
            # As attention adds them: a slot that stands for many tokens is needed more than its key says.
            scores = scores + largest_counts(self._shape, counts, self.positions)[:, :, None]
        return self._choose(partial(need_of, scores, ranks=self.ranks), sinks)

    def most_needed(self, need: Tensor, sinks: int = 0) -> Read:
        return self._choose(lambda _: need, sinks)

    def _choose(self, need: Callable[[Tensor], Tensor], sinks: int) -> Read:
        reads: Any = self._layer.tensors.reads
        recent = self._layer.spec.reader_traits.recent
        # Slots that lie together are copied together. The layers behind this one need the order of need, however.
        in_order = not reads.choice
        if self._in_order and self._reads_alike:
            return choose_in_order(self._shape, need, self.length, recent, self.memo, in_order, sinks=sinks)
        return choose(self._shape, reads.limit, need, self.positions, self.length, recent, in_order, sinks=sinks)

    # between steps

    def missing(self, found: Tensor, placed: Tensor | None) -> Tensor:
        layer = self._layer
        rows = (~found if placed is None else ~found | placed) & (self.length > 0)
        # A row that is read whole would have no index alone.
        return rows & rows.new_tensor(restricted_rows(layer.spec.reader, layer.spec.codec, layer.expected_len))

    # bytes

    def whole(self, parts: Any) -> None:
        self._link.whole(parts)

    def rows(self, source: Tensor, count: int) -> None:
        self._link.count_rows(source, count)

    def stored_keys(self, count: int) -> None:
        self._link.count_vectors(self._layer.tensors.keys, count)

    def written(self, parts: Any = (), keys: bool = True, block: int = 0) -> None:
        tensors = self._layer.tensors
        if sum(self._layer.layout.coded):  # which are written between steps
            if block and not self._layer.spec.grows:  # where a step evicts, a coded slot may be emptied
                self._count_values(self._shape.page * block)
            return
        slots = self._shape.page * (2 if self._layer.spec.merges_in_steps else 1)
        self.whole(parts)
        self.stored_keys(slots if keys else 0)
        self._link.count_vectors(tensors.values, slots * block)

    def _count_values(self, slots: int) -> None:
        """Count the decoding of the values of so many slots of each head."""
        layer = self._layer
        of_values = map(value_codes, layer.tensors.codes)
        group_size = layer.spec.codec_traits.group_size
        self._link.count_stages(of_values, layer.layout.coded, slots, group_size, self._shape.page)


class KeyProducts:
    """Products with the key of every slot that a reader divides, and means over query heads; see `Products`."""

    def __init__(self, layer: LayerContents, codes: SlotCodes, scanned: Tensor | None = None) -> None:
        """Read the slots of `layer`, whose coded ones `codes` reads, unless the products are known."""
        self._layer = layer
        self._codes = codes
        self._scanned = scanned

    def __call__(self, queries: Tensor, channels: Tensor | None = None, /) -> Tensor:
        """Products of queries [B, H, G, D], [B, H, G, S] fp32; in some channels [B, H, r] alone if they are given."""
        if self._scanned is not None:
            return self._scanned.clone()  # the engine changes scores
        layer = self._layer
        tensors = layer.tensors
        coded = self._codes.view()
        if coded is None:
            if channels is not None:
                return self._in_channels(queries, channels)
            layer.link.whole(tensors.keys)
            return kernels.products(queries, tensors.keys)
        if channels is not None:  # codes are of whole keys
            inside = torch.zeros_like(queries[:, :, 0], dtype=torch.bool).scatter(-1, channels, True)
            queries = queries.masked_fill(~inside[:, :, None], 0)
        layer.link.whole(key_codes(tensors.codes))
        return torch.cat([part.score(queries) for part in coded], -1)

    def group_mean(self, of_heads: Tensor, /) -> Tensor:
        """Mean of [B, H, G, N] over the query heads of each KV head, [B, H, N]."""
        return self._layer.ranks.group_mean(of_heads)

    def _in_channels(self, queries: Tensor, channels: Tensor) -> Tensor:
        keys = self._layer.tensors.keys
        self._layer.link.count_channels(keys, channels.shape[-1])
        taken = channels[:, :, None]
        part = keys.gather(-1, taken.expand(*keys.shape[:3], -1))
        return kernels.thin_products(queries.gather(-1, taken.expand(*queries.shape[:3], -1)), part)
