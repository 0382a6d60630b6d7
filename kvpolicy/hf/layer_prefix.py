"""The prefix of a layer whose rows share one, before their own tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.shared_prefix import SharedPrefix


class LayerPrefix(NamedTuple):
    """The prefix of a layer.

    Attributes:
        source: The layer that holds its slots.
        slots: Attends to them.
        rows: Rows that the layer begins with.
        columns: Columns of the prefix, padding included.
        digest: Digest of its mask, in the first layer of a cache; else None.
        rope_deltas: Offset of the positions behind its pictures for each row, in the first layer of a cache, or None.
    """

    source: LayerStore
    slots: SharedPrefix
    rows: int
    columns: int
    digest: int | None
    rope_deltas: list[int] | None

    def begin(self, store: LayerStore) -> Tensor | None:
        """Let an empty layer begin behind the prefix; returns the digest of each row, [B] int64, if there is one."""
        keys = self.source.tensors.keys
        empty = keys.new_empty(self.rows, self.source.shape.heads, 0, keys.shape[-1])
        shape = self.source.shape
        store.initialize(empty, self.source.ranks, shape.group, shape.value_dim)
        store.prefix = self.slots
        if self.digest is None:
            return None
        return torch.full((self.rows,), self.digest, dtype=torch.int64, device=keys.device)

    def __deepcopy__(self, memo: object) -> LayerPrefix:
        """Copies of a cache share its prefix."""
        return self
