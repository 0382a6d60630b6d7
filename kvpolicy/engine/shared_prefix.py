"""The slots of one row that several rows of another layer attend to before their own, and that nothing changes.

The queries of all rows are a single batch of queries against one copy of the keys. Attention to the shared slots and
to each row's own slots is joined by the normalizers of both: see `kvpolicy.engine.partial_attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.attention_part import Part
from kvpolicy.engine.geometry import Geometry, step_bytes
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.link import Link
from kvpolicy.engine.partial_attention import attend_occupied
from kvpolicy.engine.state import tensors
from kvpolicy.statistics.windows import TILE_ELEMENTS, ScoreTransform


class SharedPrefix:
    """The slots of a prefix, of one row, which are never written to again.

    Attributes:
        length: Tokens that the row has seen.
        nbytes: Bytes of the layer's tensors.
        step_nbytes: Bytes that a decode step reads, once for all rows.
    """

    def __init__(self, layer: LayerContents, geometry: Geometry) -> None:
        """Share the slots of a layer with one row, which holds a whole prompt."""
        self._geometry = geometry
        self._heads = layer.shape.heads
        # Asked once: a step must not wait for the device to know whether it needs a mask.
        self._whole = bool((layer.tensors.positions >= 0).all())
        self.length = int(layer.tensors.length[0])
        self.nbytes = sum(layer.nbytes_by_kind().values())
        self.step_nbytes = step_bytes(geometry).moved
        self._tensors = [*tensors(tuple(layer.tensors.parts().values()))]
        self._versions = self._count_writes()

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedPrefix:
        """Copies of a cache share its prefix."""
        return self

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing was written to its tensors since they were shared."""
        return self._versions == self._count_writes()

    def _count_writes(self) -> list[int]:
        # Tensors of inference mode count no writes.
        return [0 if t.is_inference() else t._version for t in self._tensors]  # pyright: ignore[reportPrivateUsage]

    def count_read(self, link: Link) -> None:
        """Count on `link` what a decode step reads, once for all rows."""
        self._geometry.count_read(link)

    def attend_step(self, q: Tensor, transform: ScoreTransform) -> Part:
        """Attend from one token per row to the shared slots; codes are read as codes. Traceable, no host sync.

        Args:
            q: [B, Hq, 1, D].
            transform: From products to attention weights. Its learned sinks take part where the parts are joined.

        Returns:
            Of the queries [B, H, G, 1, D].
        """
        queries = _together(q, self._heads)
        part = self._geometry.attend_part(queries, transform._replace(sinks=None), whole=self._whole)
        return _apart(part, q.shape[0], 1)

    def attend_prompt(self, q: Tensor, transform: ScoreTransform) -> Part:
        """Attend from new tokens [B, Hq, P, D] to the shared slots, which are decoded once for all; see `attend_step`.

        Returns:
            Of the queries [B, H, G, P, D].
        """
        past = self._geometry.past()
        assert past is not None, "a prefix holds tokens"
        keys, values, occupied, counts = past
        # Heads with budgets of their own are padded to the longest one.
        occupied = None if bool(occupied.all()) else occupied
        plain = transform._replace(sinks=None)
        rows = max(TILE_ELEMENTS // (keys.shape[1] * keys.shape[2]), 16)
        queries = _together(q, self._heads).split(rows, 2)
        parts = [attend_occupied(some, (keys, values), (), occupied, plain, counts) for some in queries]
        output, normalizer = (torch.cat(each, 2) for each in zip(*parts, strict=True))
        return _apart(Part(output, normalizer), q.shape[0], q.shape[2])


def _together(q: Tensor, heads: int) -> Tensor:
    """Queries [B, Hq, P, D] of all rows as those of one row, [1, H, B * G * P, D]."""
    return q.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 3)[None]


def _apart(part: Part, batch: int, new: int) -> Part:
    """The part of queries [1, H, B * G * P, D] by row, [B, H, G, P, D]."""
    output, normalizer = (t[0].unflatten(1, (batch, -1, new)).transpose(0, 1) for t in part)
    return Part(output, normalizer)
