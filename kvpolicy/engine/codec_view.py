"""Attention's view of a layer's coded slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.rotary import SlotRotary
from kvpolicy.protocols import Stage, StageStore

if TYPE_CHECKING:
    from kvpolicy.hf.layer import PolicyLayer


def stage_range(layer: PolicyLayer, stage: int) -> slice:
    """The slots of a stage."""
    start = layer.layout.starts()[stage]
    return slice(start, start + layer.layout.coded[stage])


def store_of(layer: PolicyLayer, stage: int) -> StageStore:
    """A stage's tensors."""
    traits = layer.policy.codec.traits
    query_absmax = layer.rows.query_absmax if layer.rows is not None and traits.query_absmax else None
    return StageStore(layer.codes[stage], layer.calibrations[stage], _atoms(layer), query_absmax)


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


def _turn(layer: PolicyLayer, stage: int) -> SlotRotary | None:
    if layer.rope is None or layer.rows is None:
        return None
    positions = layer.positions[..., stage_range(layer, stage)]
    return SlotRotary(layer.rope, positions, layer.length - 1, layer.rows.shift)


class _Part(NamedTuple):
    """One stage that has slots."""

    stage: Stage
    store: StageStore
    turn: SlotRotary | None
    size: int


class Coded:
    """A layer's stages, as attention takes them."""

    def __init__(self, layer: PolicyLayer) -> None:
        """Look at a layer, once for all that a step asks."""
        self._parts = [
            _Part(layer.policy.codec.stages[i], store_of(layer, i), _turn(layer, i), size)
            for i, size in enumerate(layer.layout.coded)
            if size
        ]
        self.sizes: list[int] = [part.size for part in self._parts]

    def score(self, queries: Tensor) -> list[Tensor]:
        """Products of queries [B, H, G, D] with every slot's key, [B, H, G, C] fp32 of each stage."""
        return [part.stage.score(part.store, queries, part.turn) for part in self._parts]

    def mix(self, shares: Sequence[Tensor]) -> list[Tensor]:
        """Values weighted by the shares [B, H, G, C] of each stage, [B, H, G, D] fp32 of each."""
        return [part.stage.mix(part.store, share) for part, share in zip(self._parts, shares, strict=True)]

    def read(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Keys as attention sees them, and values, [B, H, C, D] of each stage; for a prompt behind a prompt."""
        return [self._read(part, dtype) for part in self._parts]

    def _read(self, part: _Part, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        every = slice(0, part.size)
        keys = part.stage.keys(part.store, every)
        keys = keys if part.turn is None else part.turn.keys(keys, every)
        return keys.to(dtype), part.stage.values(part.store, every).to(dtype)
