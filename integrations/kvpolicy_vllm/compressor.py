"""Compressing prompts while an engine prefills them, in the process of one rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvpolicy.engine.attention import attend_tile
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.prompt_statistics import PromptStatistics
from kvpolicy.hf.dense_cache import DenseLayer, moved
from kvpolicy.hf.layer import make_store
from kvpolicy.kernels.rotary import Rope
from kvpolicy.protocols import SINGLE_RANK, Ranks
from kvpolicy.statistics import AttentionSum
from kvpolicy.statistics.statistic import first_of
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy.text.errors import KVPolicyError
from kvpolicy_vllm.ledger import Part, Saving, Work
from kvpolicy_vllm.recipe import Recipe

logger = logging.getLogger(__name__)

HOST = torch.device("cpu")


class Reader(Protocol):
    """Reads keys and values [H, n, D] of the first tokens in some blocks of a layer."""

    def read(self, blocks: Sequence[int], tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        ...


class EngineLayer(NamedTuple):
    """A layer of an engine.

    Attributes:
        rope: Its rotary embedding.
        transform: From products to attention weights.
        reader: Reads from its blocks.
        head_dim: D.
    """

    rope: Rope
    transform: ScoreTransform
    reader: Reader
    head_dim: int


@dataclass
class _Gathered:
    """Tensors of a prompt that were gathered in a layer.

    Attributes:
        store: The empty store of the layer.
        statistics: Statistics of the queries.
        attn_sum: Attention summed over them, [1, Hq, N] fp32; None if the selector does not need it.
        seen: Tokens of the prompt that are in it.
    """

    store: LayerStore
    statistics: PromptStatistics
    attn_sum: Tensor | None
    seen: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        parts = [tensor for each in self.statistics.statistics for tensor in each.tensors]
        return sum(t.nbytes for t in parts) + (0 if self.attn_sum is None else self.attn_sum.nbytes)


@dataclass
class _Held:
    """Tensors of a prompt that are held beside the engine's blocks.

    Attributes:
        gathered: Layers that are not compressed yet.
        layers: Layers that are, without the last token.
        outputs: The output of attention for the last token of the whole prompt in each layer, [Hq * D].
    """

    gathered: dict[int, _Gathered] = field(default_factory=dict)
    layers: dict[int, DenseLayer] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = [t for layer in self.layers.values() for t in layer[1:]] + [*self.outputs.values()]
        return sum(t.nbytes for t in tensors) + sum(each.nbytes for each in self.gathered.values())


class Compressor:
    """Gathers what a selector needs of prompts, compresses them, and holds them until they are in blocks again.

    The second request of a prompt computes the last token again, in front of which only the kept tokens stand. In the
    prompt it attended to all of them: its output of attention is therefore put back in every layer, so that its keys,
    its values and the first generated token are those of the whole prompt.

    Args:
        recipe: How prompts are compressed.
        layers: The layers of this rank.
        ranks: The ranks that hold the other heads.

    Attributes:
        peak: The most bytes that were held at once.
    """

    def __init__(self, recipe: Recipe, layers: Mapping[int, EngineLayer], ranks: Ranks = SINGLE_RANK) -> None:
        """Hold nothing."""
        self._recipe = recipe
        self._layers = layers
        self._ranks = ranks
        self._held: dict[str, _Held] = {}
        self._failed: set[str] = set()
        self._work = Work()
        self._places: dict[int, int] | None = None
        self._restored: set[tuple[str, int]] = set()
        self.peak = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are held beside the engine's blocks."""
        return sum(each.nbytes for each in self._held.values())

    def save(self, work: Work) -> None:
        """Take prompts out of blocks that others get, and forget those that have ended; before anything is written."""
        for name in work.dropped:
            self._held.pop(name, None)
            self._failed.discard(name)
        for saving in work.savings:
            self._guarded(saving.name, lambda saving=saving: self._save(saving))
        if work.savings:
            self._count()

    def begin(self, work: Work) -> None:
        """Begin the forward of a step."""
        self._work = work
        self._places = None
        self._restored = set()

    def lost_blocks(self) -> set[int]:
        """First blocks of requests whose last prompt token did not get its output in every layer of this step.

        What they generate would follow from the kept tokens alone.
        """
        wanted = {(last.name, layer_idx): last.block for last in self._work.last_tokens for layer_idx in self._layers}
        return {block for key, block in wanted.items() if key not in self._restored}

    def end(self) -> None:
        """End the forward of a step."""
        if self._work.parts:
            self._count()
        self._work = Work()

    def see(self, layer_idx: int, queries: Tensor, keys: Tensor, out: Tensor, slots: Tensor) -> None:
        """See a layer of a forward, which has its tokens in the blocks by now.

        Args:
            layer_idx: The layer.
            queries: Of all tokens of the step, [T, Hq * D] or [T, Hq, D].
            keys: [T, H * D] or [T, H, D].
            out: What attention has put out, [T, Hq * D] or [T, Hq, D]; rows of last tokens are replaced.
            slots: The slot of each token, [T or more].
        """
        work = self._work
        if not work.parts and not work.last_tokens:
            return
        places = self._places
        if places is None:
            places = self._places = self._find(slots)
        for part in work.parts:
            self._guarded(part.name, lambda part=part: self._gather(part, layer_idx, queries, keys, out, places))
        for last in work.last_tokens:
            held = self._held.get(last.name)
            stored = None if held is None else held.outputs.get(layer_idx)
            if stored is not None and last.slot in places:
                row = out[places[last.slot]]
                row.copy_(stored.view(row.shape))
                self._restored.add((last.name, layer_idx))

    def take(self, name: str) -> list[DenseLayer]:
        """The layers of a compressed prompt, which are held no longer.

        Raises:
            KVPolicyError: If it could not be compressed.
        """
        held = self._held.get(name)
        if held is None or name in self._failed or held.layers.keys() != self._layers.keys():
            raise KVPolicyError(
                "The prompt must be compressed, got an error in a worker; try its traceback in the log of the engine."
            )
        layers = held.layers
        held.layers = {}
        return [*layers.values()]

    def _guarded(self, name: str, do: Callable[[], None]) -> None:
        """Do something with a prompt: whatever goes wrong with it, other requests must go on."""
        if name in self._failed:
            return
        try:
            do()
        except Exception:
            logger.exception("A prompt cannot be compressed.")
            self._failed.add(name)
            self._held.pop(name, None)

    def _find(self, slots: Tensor) -> dict[int, int]:
        """The row of each slot that is looked for among the tokens of a step; one transfer to the host."""
        work = self._work
        wanted = [part.slot for part in work.parts] + [last.slot for last in work.last_tokens]
        try:
            same = slots.flatten()[None] == torch.tensor(wanted, device=slots.device)[:, None]
            rows = torch.where(same.any(1), same.int().argmax(1), -1).tolist()
        except Exception:  # these prompts fail, and no other request
            logger.exception("The tokens of a step cannot be found.")
            return {}
        return {slot: row for slot, row in zip(wanted, rows, strict=True) if row >= 0}

    def _gather(
        self, part: Part, layer_idx: int, queries: Tensor, keys: Tensor, out: Tensor, places: Mapping[int, int]
    ) -> None:
        """Take a part of a prompt in a layer, and compress it if it is the last one."""
        layer = self._layers[layer_idx]
        held = self._held.setdefault(part.name, _Held())
        if layer_idx in held.layers:  # preempted after its last part: it is computed again
            return
        known = held.gathered.get(layer_idx)
        seen = 0 if known is None else known.seen
        stop = part.start + part.tokens
        if part.start > seen:
            raise RuntimeError(f"The {part.start} computed tokens of a prompt must all be seen, got {seen}.")
        if stop <= seen:  # the same after a preemption
            return
        row = places[part.slot]
        rows = slice(row + seen - part.start, row + part.tokens)
        q, k = (t[rows].reshape(stop - seen, -1, layer.head_dim).transpose(0, 1)[None] for t in (queries, keys))
        if known is None:
            known = held.gathered[layer_idx] = self._begun(layer_idx, part.total, q, k)
        known.statistics.add(q, k, seen)
        if known.attn_sum is not None:
            past, values = (t[None] for t in layer.reader.read(part.blocks, stop))
            attend_tile(q, past, values, layer.transform, None, None, known.attn_sum)
        known.seen = stop
        if stop == part.total:
            held.outputs[layer_idx] = out[row + part.tokens - 1].flatten().to(HOST, copy=True)
            held.layers[layer_idx] = self._compressed(layer_idx, part, known)
            del held.gathered[layer_idx]

    def _begun(self, layer_idx: int, total: int, q: Tensor, k: Tensor) -> _Gathered:
        """A prompt of which nothing was seen, like the first queries and keys."""
        layer = self._layers[layer_idx]
        policy = self._recipe.policy
        store = make_store(policy, layer_idx, layer.rope if policy.undoes_rotation else None)
        store.initialize(k, self._ranks, q.shape[1] // k.shape[1])
        sums = first_of(AttentionSum, store.contents.prompt_statistics) is not None
        attn_sum = torch.zeros(1, q.shape[1], total, device=q.device, dtype=torch.float32) if sums else None
        return _Gathered(store, PromptStatistics(store.contents, None, total), attn_sum)

    def _compressed(self, layer_idx: int, part: Part, known: _Gathered) -> DenseLayer:
        """The kept tokens of a layer but the last one, as if the last one stood behind them; in host memory."""
        layer = self._layers[layer_idx]
        store = known.store
        keys, values = (t[None] for t in layer.reader.read(part.blocks, part.total))
        pending = known.statistics.prompt(keys, values, layer.transform, None, known.attn_sum)
        store.compress(store.end_prompt(pending, None), self._recipe.budget(part.total))
        kept = self._recipe.kept(part.total)
        past = store.past()
        positions = store.tensors.positions
        if past is None or not bool((past.occupied.sum(-1) == kept).all()):
            raise RuntimeError(f"{self._recipe.policy} must keep {kept} tokens in every head of layer {layer_idx}.")
        keys, values = (t[0][past.occupied[0]].unflatten(0, (-1, kept)) for t in (past.keys, past.values))
        order = positions[0][past.occupied[0]].unflatten(0, (-1, kept)).argsort(-1)
        newest = positions[0].amax(-1)
        if not bool((newest == part.total - 1).all()):
            raise RuntimeError(f"{self._recipe.policy} must keep the last token in every head of layer {layer_idx}.")
        at = order[:, :-1, None].expand(-1, -1, keys.shape[-1])
        keys, values = (t.gather(1, at).to(HOST) for t in (keys, values))
        return DenseLayer(layer_idx, moved(keys, part.total - kept, layer.rope), values)

    def _save(self, saving: Saving) -> None:
        """Take the kept tokens of a prompt out of its blocks."""
        held = self._held[saving.name]
        for layer_idx, layer in self._layers.items():
            keys, values = (t.to(HOST, copy=True) for t in layer.reader.read(saving.blocks, saving.kept))
            held.layers[layer_idx] = DenseLayer(layer_idx, keys, values)

    def _count(self) -> None:
        self.peak = max(self.peak, self.nbytes)
