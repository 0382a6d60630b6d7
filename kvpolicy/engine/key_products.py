"""The products of queries with the keys of a layer, as a reader takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.reading import key_codes
from kvpolicy.engine.slot_codes import SlotCodes
from kvpolicy.kernels.products import products, thin_products


class KeyProducts:
    """Products with the key of every slot that a reader divides, and means over query heads; see `Products`."""

    def __init__(self, layer: LayerContents, codes: SlotCodes) -> None:
        """Read the slots of `layer`, whose coded ones `codes` reads."""
        self._layer = layer
        self._codes = codes

    def __call__(self, queries: Tensor, channels: Tensor | None = None, /) -> Tensor:
        """Products of queries [B, H, G, D], [B, H, G, S] fp32; in some channels [B, H, r] alone if they are given."""
        layer = self._layer
        tensors = layer.tensors
        coded = self._codes.view()
        if coded is None:
            if channels is not None:
                return self._in_channels(queries, channels)
            layer.link.whole(tensors.keys)
            return products(queries, tensors.keys)
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
        return thin_products(queries.gather(-1, taken.expand(*queries.shape[:3], -1)), part)
