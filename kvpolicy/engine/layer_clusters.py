"""The clusters that a layer's reader chooses by: when they are found, and what is counted and estimated of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.clusters import ClusterTokens
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.reading import Chosen, ReadShape, ReadState, chooses, entry_slots, log_tokens, restricted_rows
from kvpolicy.engine.slot_codes import SlotCodes
from kvpolicy.kernels.mixed_values import mixed_values
from kvpolicy.protocols import Estimated, Index


class LayerClusters:
    """Finds the clusters of a layer, and looks them up; see `kvpolicy.protocols.Clusters`.

    Attributes:
        are_used: Whether the layer chooses by clusters.
    """

    def __init__(self, layer: LayerContents, codes: SlotCodes) -> None:
        """Read the slots of `layer`, whose coded ones `codes` reads."""
        self._layer = layer
        self._codes = codes
        clusters = layer.spec.reader_traits.clusters
        self.are_used = clusters is not None and chooses(layer.spec.reader, layer.spec.layer_idx)
        self._clusters: Any = clusters

    # a step

    def tokens(self, shape: ReadShape, index: Index, clusters: int) -> ClusterTokens:
        """The tokens of the layer in each of its `clusters` clusters."""
        tensors = self._layer.tensors
        each = log_tokens(shape, tensors.log_counts, tensors.positions)
        return ClusterTokens.counted(self._clusters.assigned(index), each, clusters)

    def unread(self, score: Tensor, clusters: ClusterTokens, chosen: Chosen) -> Tensor | None:
        """Scores of what is not read of each cluster, [B, H, G, C] fp32; None if nothing is estimated.

        Args:
            score: Scores of the clusters, scaled and capped, [B, H, G, C] fp32.
            clusters: The clusters and their tokens.
            chosen: What is read.
        """
        if not self._clusters.estimates_rest:
            return None
        found: Any = chosen
        return score + clusters.unread(found.entries, found.read).log()[:, :, None]

    def estimate(self, chosen: Chosen, normalizer: Tensor) -> Estimated:
        """Slots that stand for what was not chosen, whatever the `normalizer` of the chosen ones is."""
        reads: Any = self._layer.tensors.reads
        scores: Any = chosen.scores
        return Estimated(scores, self._clusters.mean_values(reads.index))

    def centers(self, index: Index) -> Any:
        """Tensors of the index that are read to assign keys to clusters; none without clusters."""
        return self._clusters.centers(index) if index and self.are_used else ()

    # between steps

    def are_missing(self, shape: ReadShape | None) -> bool:
        """Whether a row has no clusters and is read in part."""
        reads = self._layer.tensors.reads
        if shape is None or not reads or not self.are_used:  # without waiting for the device
            return False
        return bool(self._rows(reads.index, None).any())

    def find(self, shape: ReadShape, reads: ReadState | tuple[()], placed: Tensor | None) -> None:
        """Find the clusters of rows that are `placed` [B] bool, and of those that lack them."""
        if not reads or not self.are_used:
            return
        rows = self._rows(reads.index, placed)
        if not bool(rows.any()):
            return
        positions = self._layer.tensors.positions
        entries = torch.arange(shape.entries, device=positions.device).expand(*positions.shape[:2], -1)
        slots = entry_slots(shape, entries)[0].flatten(2)
        self._clusters.fit_clusters(reads.index, *self._vectors_at(slots), positions.gather(-1, slots), rows)

    def _rows(self, index: Index, placed: Tensor | None) -> Tensor:
        """Rows that have no clusters, and those that are `placed` [B] bool, if they are read in part, [B] bool."""
        layer = self._layer
        rows = to_find(self._clusters.has_clusters(index), placed, layer.tensors.length)
        # A row that is read whole would have no clusters alone.
        restricted = restricted_rows(layer.spec.reader, layer.spec.codec, layer.expected_len)
        return rows & rows.new_tensor(restricted)

    def _vectors_at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys of slots [B, H, n] and what attention mixes of them, [B, H, n, D] each."""
        tensors = self._layer.tensors
        link = self._layer.link
        coded = self._codes.view()
        if coded is None:
            keys, values = link.rows(tensors.keys, slots), link.rows(tensors.values, slots)
        else:
            dtype = tensors.keys.dtype
            keys, values = coded.keys_at(slots, dtype), coded.values_at(slots, dtype)
        return keys, mixed_values(keys, values)


def to_find(found: Tensor, placed: Tensor | None, length: Tensor) -> Tensor:
    """Rows with tokens for which clusters, or a basis, are to be found, [B] bool.

    Args:
        found: Rows that have them, [B] bool.
        placed: Rows for which they are found again, [B] bool; None for none.
        length: Tokens of each row, [B] int64.
    """
    rows = ~found if placed is None else ~found | placed
    return rows & (length > 0)
