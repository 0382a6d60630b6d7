"""Attention's view of a layer's coded slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvpolicy.protocols import Store
from kvpolicy.rotary import SlotTurn

if TYPE_CHECKING:
    from kvpolicy.layer import PolicyLayer


def stage_range(layer: PolicyLayer, stage: int) -> slice:
    """The slots of a stage."""
    start = layer.layout.starts()[stage]
    return slice(start, start + layer.layout.coded[stage])


def store_of(layer: PolicyLayer, stage: int) -> Store:
    """A stage's tensors."""
    traits = layer.policy.codec.traits
    peaks = layer.rows.peaks if layer.rows is not None and traits.peaks else None
    return Store(layer.codes[stage], layer.books[stage], _atoms(layer), peaks)


def _atoms(layer: PolicyLayer) -> tuple[Tensor, Tensor] | None:
    if not layer.frozen or layer.rows is None:
        return None
    assert layer.keys is not None and layer.values is not None
    none = (layer.rows.pins < 0)[..., None]
    keys, values = (t[:, :, : layer.frozen].masked_fill(none, 0) for t in (layer.keys, layer.values))
    return codec_keys(layer, keys, layer.rows.pins).to(keys.dtype), values


def codec_keys(layer: PolicyLayer, keys: Tensor, positions: Tensor) -> Tensor:
    """Keys [B, H, n, D] at positions [B, H, n] as the layer's codec wants them."""
    if layer.rope is None or layer.rows is None:
        return keys
    return layer.rope.undo(keys, positions + layer.rows.shift[:, None, None])


def _turn(layer: PolicyLayer, stage: int) -> SlotTurn | None:
    if layer.rope is None or layer.rows is None:
        return None
    positions = layer.positions[..., stage_range(layer, stage)]
    return SlotTurn(layer.rope, positions, layer.length - 1, layer.rows.shift)


class Coded:
    """A layer's stages, as a decode step attends to them: scored and mixed, never joined."""

    def __init__(self, layer: PolicyLayer) -> None:
        """Look at a layer."""
        self._layer = layer
        self.sizes = list(layer.layout.coded)

    def score(self, queries: Tensor) -> list[Tensor]:
        """Products of queries [B, H, G, D] with every slot's key, [B, H, G, C] fp32 of each stage."""
        layer = self._layer
        return [
            stage.score(store_of(layer, i), queries, _turn(layer, i))
            for i, stage in enumerate(layer.policy.codec.stages)
            if layer.layout.coded[i]
        ]

    def mix(self, shares: list[Tensor]) -> list[Tensor]:
        """Values weighted by the shares [B, H, G, C] of each stage, [B, H, G, D] fp32 of each."""
        layer, following = self._layer, iter(shares)
        return [
            stage.mix(store_of(layer, i), next(following))
            for i, stage in enumerate(layer.policy.codec.stages)
            if layer.layout.coded[i]
        ]


def read_all(layer: PolicyLayer, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Keys, as attention sees them, and values of every stage, each [B, H, C, D]; for a prompt behind a prompt."""
    parts: list[tuple[Tensor, Tensor]] = []
    for i, stage in enumerate(layer.policy.codec.stages):
        if i < len(layer.layout.coded) and layer.layout.coded[i]:
            store, every, turn = store_of(layer, i), slice(0, layer.layout.coded[i]), _turn(layer, i)
            keys = stage.keys(store, every)
            keys = keys if turn is None else turn.keys(keys, every)
            parts.append((keys.to(dtype), stage.values(store, every).to(dtype)))
    return parts
