"""The keys that a step rebuilds from a reader's index: when their basis is found, and how they are rotated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.layer_clusters import to_find
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.link import Link
from kvpolicy.engine.reading import Chosen, ReadShape, ReadState, chooses
from kvpolicy.kernels.products import of_tokens
from kvpolicy.kernels.rotary import KeyRotation, SlotRotary
from kvpolicy.protocols import Index

_TILE = 512
"""Slots of each head whose keys are unrotated at a time to find a basis."""


class RebuiltKeys:
    """Keeps what the keys of a layer are rebuilt from, and rebuilds them; see `kvpolicy.protocols.RebuildsKeys`."""

    def __init__(self, layer: LayerContents) -> None:
        """Rebuild keys of the slots of `layer`, which are all in full precision."""
        self._layer = layer
        rebuilt = layer.spec.reader_traits.rebuilt
        self.are_used = rebuilt is not None and chooses(layer.spec.reader, layer.spec.layer_idx)
        self._rebuilt: Any = rebuilt

    # a step

    def read(self, chosen: Chosen) -> Tensor:
        """The keys of the slots that a step reads, [B, H, n, D], in the dtype of the keys.

        The newest tokens and those at the first positions have their own keys, and the others have rebuilt ones.
        """
        layer = self._layer
        tensors = layer.tensors
        reads: Any = tensors.reads
        traits = layer.spec.reader_traits
        slots = chosen.slots
        layer.link.whole(self._rebuilt.basis(reads.index))
        self._count_coefficients(layer.link, reads.index, slots.shape[-1])
        positions = tensors.positions.gather(-1, slots)
        plain = self._rebuilt.rebuild_keys(reads.index, slots)
        keys = self._rotated(plain, positions, reads).to(tensors.keys.dtype)
        last = tensors.length.int()[:, None, None] - 1
        stored = ((positions > last - traits.recent) | (positions < traits.sinks)) & chosen.chosen & (positions >= 0)
        # Without slots that are named twice, no head has more of them, so that all are among these.
        at = stored.float().topk(self.stored(slots.shape[-1]), -1).indices
        vectors = at[..., None].expand(*at.shape, keys.shape[-1])
        own = layer.link.rows(tensors.keys, slots.gather(-1, at))
        return keys.scatter(2, vectors, torch.where(stored.gather(-1, at)[..., None], own, keys.gather(2, vectors)))

    def stored(self, slots: int) -> int:
        """How many keys a step reads as they are stored, if it reads `slots` slots of each head."""
        traits = self._layer.spec.reader_traits
        return min(traits.recent + traits.sinks, slots)

    def _rotated(self, keys: Tensor, positions: Tensor, reads: ReadState) -> Tensor:
        """Unrotated keys [B, H, n, D] at positions [B, H, n], as attention sees them, fp32."""
        rope = self._layer.spec.rope
        if rope is None:
            return keys
        offset: Any = reads.rope_offset
        return SlotRotary(rope, positions, self._layer.tensors.length - 1, offset).keys(keys, slice(None))

    def scored(self, index: Index) -> Any:
        """Tensors of the index that a step reads to score entries."""
        return self._rebuilt.scored(index) if self.are_used else index

    def count_read(self, link: Link, index: Index, slots: int) -> None:
        """Count on `link` the keys of a step that reads `slots` slots, and what it reads to rebuild them."""
        if not self.are_used:
            link.count_vectors(self._layer.tensors.keys, slots)
            return
        basis = self._rebuilt.basis(index)
        link.whole((basis, basis))  # for the key that is written, and for those that are read
        self._count_coefficients(link, index, slots)
        link.count_vectors(self._layer.tensors.keys, self.stored(slots))

    def _count_coefficients(self, link: Link, index: Index, slots: int) -> None:
        """Count on `link` what the heads read of the coefficients, for `slots` slots each."""
        held = self._rebuilt.coefficients(index)
        # Heads that share coefficients choose slots of their own.
        link.count_rows(held, slots * (self._layer.tensors.keys.shape[1] // held.shape[1]))

    def project(self, reads: ReadState, entries: Tensor, slots: Tensor, keys: Tensor, occupied: Tensor) -> None:
        """Compute the coefficients of entries [B, H, n], if keys are rebuilt.

        Args:
            reads: The tensors of the reader.
            entries: The entries.
            slots: Their slots, [B, H, n * page].
            keys: The keys of these slots, [B, H, n * page, D].
            occupied: Which of the slots hold a token, [B, H, n, page] bool.
        """
        if not self.are_used:
            return
        self._layer.link.whole(self._rebuilt.basis(reads.index))
        plain = self._unrotated(reads, slots, keys)
        self._rebuilt.project(reads.index, entries, plain.unflatten(2, occupied.shape[2:]), occupied)

    def _unrotated(self, reads: ReadState, slots: Tensor, keys: Tensor) -> Tensor:
        """The keys [B, H, n, D] of slots [B, H, n] without their rotation, fp32."""
        offset: Any = reads.rope_offset
        positions = self._layer.tensors.positions.gather(-1, slots)
        return KeyRotation(self._layer.spec.rope, offset).undone(keys, positions)

    # between steps

    def are_missing(self) -> bool:
        """Whether a row with tokens has no basis; waits for the device."""
        reads = self._layer.tensors.reads
        return self.are_used and bool(reads) and bool(self._rows(reads.index, None).any())

    def find(self, shape: ReadShape, reads: ReadState | tuple[()], placed: Tensor | None) -> None:
        """Find the basis of rows that are `placed` [B] bool, and of those that lack one."""
        if not reads or not self.are_used:
            return
        rows = self._rows(reads.index, placed)
        if bool(rows.any()):
            self._rebuilt.fit_basis(reads.index, self._moments(shape, reads), rows)

    def _rows(self, index: Index, placed: Tensor | None) -> Tensor:
        """Rows with tokens that have no basis, or are `placed` [B] bool, [B] bool."""
        return to_find(self._rebuilt.has_basis(index), placed, self._layer.tensors.length)

    def _moments(self, shape: ReadShape, reads: ReadState) -> Tensor:
        """Sums of the outer products of the unrotated keys of each head, or of all heads together, as `fit_basis`."""
        tensors = self._layer.tensors
        batch, heads, _, dim = tensors.keys.shape
        is_joint = self._rebuilt.joint_heads
        size = (1, heads * dim) if is_joint else (heads, dim)
        total = torch.zeros(batch, *size, size[-1], dtype=torch.float64, device=tensors.device)
        start, size = shape.parts[0]  # the only one: nothing is coded
        for first in range(start, start + size, _TILE):
            slots = torch.arange(first, min(first + _TILE, start + size), device=tensors.device)
            slots = slots.expand(batch, heads, -1)
            keys = self._unrotated(reads, slots, self._layer.link.rows(tensors.keys, slots))
            empty = tensors.positions.gather(-1, slots) < 0
            # In fp64, so that the sum does not depend on the order of the slots.
            keys = keys.double().masked_fill(empty[..., None], 0)
            keys = of_tokens(keys) if is_joint else keys
            total += keys.mT @ keys
        return total
