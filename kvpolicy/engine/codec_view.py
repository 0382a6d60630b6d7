"""The coded slots of a layer as attention reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.rotary import SlotRotary
from kvpolicy.protocols import At, Stage, StageStore


class StagePart(NamedTuple):
    """One stage that has slots.

    Attributes:
        stage: The stage of the codec.
        store: Its tensors.
        rope: The rotary embedding of its slots, if keys are coded unrotated.
        size: How many slots it has.
    """

    stage: Stage
    store: StageStore
    rope: SlotRotary | None
    size: int


class CodecView:
    """Every coded slot of a layer, stage by stage."""

    def __init__(self, parts: Sequence[StagePart]) -> None:
        """View the stages that have slots."""
        self._parts = parts
        self.sizes: list[int] = [part.size for part in parts]

    def score(self, queries: Tensor) -> list[Tensor]:
        """Products of queries [B, H, G, D] with every slot's key, [B, H, G, C] fp32 for each stage."""
        return [part.stage.score(part.store, queries, part.rope) for part in self._parts]

    def mix(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Values weighted by the attention weights [B, H, G, C] of each stage, [B, H, G, D] fp32 for each."""
        return [part.stage.mix(part.store, own) for part, own in zip(self._parts, weights, strict=True)]

    def read(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Rotated keys and values of every slot, [B, H, C, D] for each stage; for a prompt after another."""
        return [self._read_stage(part, dtype) for part in self._parts]

    def read_at(self, slots: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Rotated keys and values of slots [B, H, n], counted from the first coded one, [B, H, n, D] for each stage.

        A stage that does not have a slot reads another one in its place.
        """
        starts = [sum(self.sizes[:number]) for number in range(len(self.sizes))]
        pairs = zip(self._parts, starts, strict=True)
        return [self._read_stage(part, dtype, (slots - start).clamp(0, part.size - 1)) for part, start in pairs]

    def _read_stage(self, part: StagePart, dtype: torch.dtype, at: At | None = None) -> tuple[Tensor, Tensor]:
        at = slice(0, part.size) if at is None else at
        keys = part.stage.keys(part.store, at)
        if part.rope is not None:
            keys = part.rope.keys(keys, at)
        return keys.to(dtype), part.stage.values(part.store, at).to(dtype)
