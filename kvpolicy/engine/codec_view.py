"""The coded slots of a layer as attention reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.kernels.mixed_values import mixed_values
from kvpolicy.kernels.products import matmul, products
from kvpolicy.kernels.rotary import SlotRotary
from kvpolicy.protocols import At, Stage, StageStore


class StagePart(NamedTuple):
    """One stage that has slots.

    Attributes:
        stage: The stage of the codec.
        store: Its tensors.
        rope: The rotary embedding of its slots, if keys are coded unrotated.
        size: How many slots it has.
        start: Its first slot in the layer.
    """

    stage: Stage
    store: StageStore
    rope: SlotRotary | None
    size: int
    start: int = 0


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

    def _read_stage(self, part: StagePart, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        every = slice(0, part.size)
        return _keys(part, every).to(dtype), part.stage.values(part.store, every).to(dtype)

    def keys_at(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Rotated keys of coded slots of the layer [B, H, n], [B, H, n, D]; no other slot is decoded."""
        return self._at(slots, _keys).to(dtype)

    def values_at(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Values of coded slots of the layer [B, H, n], [B, H, n, D]; no other slot is decoded."""
        return self._at(slots, lambda part, at: part.stage.values(part.store, at)).to(dtype)

    def _at(self, slots: Tensor, decode: Callable[[StagePart, Tensor], Tensor]) -> Tensor:
        # How many of the slots lie in which stage depends on data, so each stage decodes as many. A slot of another
        # stage stands for the stage's first or last one, and its result is not taken.
        found: Tensor | None = None
        for part in self._parts:
            own = decode(part, (slots - part.start).clamp(0, part.size - 1))
            found = own if found is None else torch.where((slots >= part.start)[..., None], own, found)
        assert found is not None, "there are no coded slots"
        return found


class ChosenSlots:
    """Some coded slots of a layer, decoded, as a step attends to them that reads no others."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Take rotated keys and values, [B, H, n, D] and [B, H, n, D']."""
        self._keys = keys
        self._values = mixed_values(keys, values)
        self.sizes: list[int] = [keys.shape[2]]

    def score(self, queries: Tensor) -> list[Tensor]:
        """Products of queries [B, H, G, D] with the keys, [B, H, G, n] fp32."""
        return [products(queries, self._keys.to(queries.dtype))]

    def mix(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Values weighted by the attention weights [B, H, G, n], [B, H, G, D] fp32."""
        return [matmul(weights[0], self._values.to(weights[0].dtype)).float()]


def _keys(part: StagePart, at: At) -> Tensor:
    """Rotated keys of the slots `at` of a stage, in the order that `At` describes."""
    keys = part.stage.keys(part.store, at)
    return keys if part.rope is None else part.rope.keys(keys, at)
