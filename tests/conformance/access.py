"""What tests take from the internals of the engine and of the cache: adapt this file when they change.

`bench.py` beside it drives a layer's store without a model; all else goes through public names.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from kvpolicy import PolicyCache
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.engine.state import tensors
from kvpolicy.hf.latent import LatentSlots
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.projection import output_projection
from kvpolicy.hf.replay import ReplayCache
from kvpolicy.statistics.ranks import Ranks

Slots = list[list[int | None]]
"""The position in each slot of each stage, None where it is dead."""

Attend = Callable[..., Tensor]
"""Takes a cache, the index of a layer, q, k, v, the flags of tokens that are no padding, the score transform, more."""


def kept_positions(layer: LayerStore | PolicyLayer) -> list[list[list[int]]]:
    """The positions that each row and head holds, ascending."""
    return [[sorted(p for p in head if p >= 0) for head in row] for row in head_positions(layer).tolist()]


def head_positions(layer: LayerStore | PolicyLayer) -> Tensor:
    """The positions of each head, -1 for none, [B, H, n]: slots, or those of the head's pages."""
    return layer.geometry.head_positions() if isinstance(layer, LayerStore) else layer.head_positions


def coded_positions(layer: LayerStore) -> list[list[Slots]]:
    """The position in each slot of each stage, for each row and head."""
    ends = [(start, start + count) for start, count in zip(layer.layout.starts(), layer.layout.coded, strict=True)]

    def head(positions: list[int]) -> Slots:
        return [[p if p >= 0 else None for p in positions[start:stop]] for start, stop in ends]

    return [[head(positions) for positions in row] for row in layer.tensors.positions.tolist()]


def store_of(cache: PolicyCache, layer_idx: int) -> LayerStore:
    """What owns the tensors of a layer."""
    layer: Any = cache.layers[layer_idx]
    return layer.store


def selector_state(layer: PolicyLayer) -> Any:
    """The named tuple that a layer's selector keeps."""
    return layer.store.tensors.state


def ranks_of(layer: PolicyLayer) -> Ranks:
    """The part of a model's heads that a layer holds."""
    return layer.store.ranks


def stage_codes(layer: PolicyLayer) -> tuple[Any, ...]:
    """The named tuple of each stage of a layer's codec."""
    return layer.store.tensors.codes


def static_tensors(cache: PolicyCache) -> list[Tensor]:
    """Everything that a decode step reads and writes, which must stay where it is."""
    found: list[Tensor] = []
    for layer in cache.policy_layers:
        held = layer.store.tensors
        found += [held.keys, held.values, held.positions, held.length, held.budget, held.columns]
        others = (held.state, held.codes, layer.store.contents.calibrations, held.limits or (), held.reads)
        found += tensors(others)
    return found


def addresses(cache: PolicyCache) -> list[int]:
    """Where these tensors are."""
    return [tensor.data_ptr() for tensor in static_tensors(cache)]


@contextmanager
def always_folded() -> Generator[None]:
    """Let latent attention fold its expansion also where nothing stands before a prompt, so that outputs are alike."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LatentSlots, "holds_tokens", True)
        yield


@contextmanager
def attending(around: Callable[[Attend], Attend], *, replays: bool = False) -> Generator[None]:
    """Replace what every layer of every cache does with queries, keys and values by `around(what it did)`.

    Args:
        around: Makes the replacement.
        replays: Whether replays are replaced, too.
    """
    with pytest.MonkeyPatch.context() as patch:
        if replays:
            patch.setattr(ReplayCache, "attend", around(ReplayCache.attend))
        patch.setattr(PolicyCache, "attend", around(PolicyCache.attend))
        yield


@contextmanager
def replaying(told: Callable[..., None]) -> Generator[None]:
    """Tell of every layer of every replay: the index of the one whose keys it reads, the chunk's number, queries, keys,
    which tokens are no padding, and, if norms are asked for, the layer's input and the output projection."""
    attend = ReplayCache.attend

    def attend_and_tell(
        self: ReplayCache, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, valid: Any, transform: Any, forward: Any
    ) -> Tensor:
        norms = () if forward is None else (forward.hidden_states.clone(), output_projection(forward.module))
        told(self.owner(layer_idx), self.chunk.number, q.clone(), k.clone(), self.valid, *norms)
        return attend(self, layer_idx, q, k, v, valid, transform, forward)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplayCache, "attend", attend_and_tell)
        yield


@contextmanager
def noticing(budget: Callable[[int, list[int]], None], hidden: Callable[[int, Tensor], None]) -> Generator[None]:
    """Tell of what layers are told before they compress a prompt.

    Args:
        budget: Takes the index of a layer, and how many tokens each row may keep of its prompt.
        hidden: Takes the index of a layer and its input [B, P, M], where the codec looks at it.
    """
    compress = LayerStore.compress
    note_massive = PolicyCache.note_massive

    def compress_and_tell(self: LayerStore, pending: PendingPrompt, given: RowBudget, **more: Any) -> None:
        budget(self.layer_idx, given.keep.tolist())
        compress(self, pending, given, **more)

    def note_and_tell(self: PolicyCache, layer_idx: int, given: Tensor) -> None:
        hidden(layer_idx, given.detach().clone())
        note_massive(self, layer_idx, given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerStore, "compress", compress_and_tell)
        patch.setattr(PolicyCache, "note_massive", note_and_tell)
        yield
