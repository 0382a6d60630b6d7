"""Loki: read the tokens whose keys have the largest product with the query in a few principal components."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs import _files, projection
from kvpolicy.codecs.projection import Basis
from kvpolicy.kernels.in_memory import in_memory
from kvpolicy.kernels.products import thin_products
from kvpolicy.kernels.slot_writes import write_slots
from kvpolicy.protocols import ALL_HEADS, ModelInfo, ReaderTraits
from kvpolicy.readers.common import Amount, TokenReader, amount
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import AutoInt, least, strategy, tiny_or

METHOD = "lowrank"
"""The method of a calibration folder that this reader takes, as the codec `lowrank` does."""


class LokiIndex(NamedTuple):
    """The index of one layer.

    Attributes:
        coordinates: The first coordinates of each key in the basis of its head, [B, H, X, r] in the dtype of the keys.
    """

    coordinates: Tensor


@strategy
class Loki(TokenReader):
    """Read the tokens whose keys have the largest product with the query in a few principal components.

    The keys of a head vary little in most directions. `kvpolicy calibrate lowrank` finds the directions in which they
    vary most, for the codec `lowrank` and for this reader. The index holds the first coordinates of every key in this
    basis. A step multiplies them with the same coordinates of the query, and reads the tokens with the largest results.
    Single tokens are chosen, so the order of the slots does not matter: this reader suits caches that evict.

    Args:
        read: How many tokens each KV head reads in a step (int), or the fraction of the layer's slots (float).
        channels: Coordinates in the index, at most the head dimension; `auto`: a quarter of it.
        dense: How many of the model's first layers read everything.
        recent: The newest tokens that are always read; the newest one and the first kept one always are.
        calibration: Folder of the calibration, which `kvpolicy calibrate lowrank` writes, or the name of an embedded
            model, `tiny` or `tiny-4k`.

    Raises:
        KVPolicyTypeError: If a value is of another type.
        KVPolicyError: If a value is out of range.

    Examples:
        >>> Loki(read=0.05).count(1000)
        50
        >>> Loki(channels=4).load_basis(0, "cpu").shape
        torch.Size([4, 32, 4])

    Source:
        Loki (Singhania et al., NeurIPS 2024, arXiv:2406.02542), Algorithm 1, and its authors' code, commit 005913b.
        Differences:

        - Keys are stored as they are, and the index is a copy of a few coordinates. The authors store keys rotated into
          the basis, whose first coordinates are then a part of the keys, and hold no index.
        - The basis is always that of keys with their rotary embedding, as the index has them; the authors choose that
          or the basis of unrotated keys by model, and apply either to rotated keys.
        - All layers have as many coordinates; the authors may choose them by the share of the variance instead.
        - The mean of the calibrated keys is not subtracted, as in the authors' code: it adds the same number to all
          scores of a query.
        - There is one set of tokens per KV head (the authors: per query head): a token is as needed as the query head
          says that weights it most, after a softmax over the tokens.
        - The newest token and the first kept one are always read. Ties go to the earlier position.
        - The prompt is attended to in full; the authors' evaluation reads a part there too.
    """

    read: Amount = amount(256)
    channels: AutoInt = least(1, "auto")
    dense: int = least(0, 0)
    recent: int = least(1, 1)
    calibration: str = tiny_or("a folder")

    @property
    def traits(self) -> ReaderTraits:
        """The index is of coordinates in a basis."""
        return ReaderTraits(dense=self.dense, recent=self.recent, basis=self)

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if a key has fewer coordinates, or the calibration is missing or of another model."""
        if self._width(model.head_dim) > model.head_dim:
            raise KVPolicyError(
                f"Loki.channels must be at most the head dimension of {model.head_dim}, got {self.channels}; try "
                f"{max(1, model.head_dim // 4)}."
            )
        _files.check_model(_files.load(self.calibration, METHOD), self.calibration, model)
        for layer_idx in model.indices:
            heads, width = projection.shape_of(Basis(self.calibration), layer_idx)
            _files.check_heads(self.calibration, METHOD, heads, width, model)

    def load_basis(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> Tensor:
        """The principal components of the keys of a layer; see `LoadsBasis`."""
        _, head_dim = projection.shape_of(Basis(self.calibration), layer_idx)
        rank = self._width(head_dim)
        return projection.of_keys(Basis(self.calibration), rank, layer_idx, device, heads).encode[0]

    def alloc(
        self, batch: int, heads: int, entries: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> LokiIndex:
        width = self._width(head_dim)
        return LokiIndex(torch.zeros(batch, heads, entries, width, dtype=dtype, device=device))

    def refresh(self, index: LokiIndex, entries: Tensor, keys: Tensor, occupied: Tensor) -> None:
        """Take the coordinates of some keys; see `Reader.refresh`."""
        keys = keys.squeeze(3).masked_fill(~occupied, 0)  # a page is one slot
        write_slots(index.coordinates, entries, keys.to(index.coordinates.dtype))

    def score(self, index: LokiIndex, queries: Tensor, products: Callable[[Tensor], Tensor]) -> Tensor:
        """The products in these coordinates, [B, H, G, X] fp32."""
        return thin_products(in_memory(queries), index.coordinates)

    def _width(self, head_dim: int) -> int:
        """Coordinates in the index."""
        return max(1, head_dim // 4) if self.channels == "auto" else self.channels
