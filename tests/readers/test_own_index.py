"""A reader with an index of its own, in one file: it is kept, chosen by, counted, planned and saved by the engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import kvpolicy
from kvpolicy import Policy, PolicyCache
from kvpolicy.protocols import Changed, Estimated, Fitted, Read, Reader, ReaderTraits, SlotAccess
from kvpolicy.testing import check
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch, talk

LENGTHS = [26, 17]
TURNS = [26] + [1] * 6


class Directions(NamedTuple):
    """How far each key points along the mean key of its head.

    Attributes:
        mean: The mean key of each head at its last prompt, [B, H, 1, D] fp32; 0 before one.
        along: The product of each key with it, [B, H, X, 1] fp32.
        value: The mean value then, [B, H, 1, D] fp32.
    """

    mean: Tensor
    along: Tensor
    value: Tensor


@dataclass(frozen=True, kw_only=True)
class Against(Reader):
    """Reads the tokens whose keys point most against the mean key, and one mean value for all others."""

    read: int = 6

    @property
    def traits(self) -> ReaderTraits:
        return ReaderTraits(fitted=self, resort=4, estimates_rest=True)

    def count(self, slots: int) -> int:
        return min(self.read, slots)

    def alloc(
        self, batch: int, heads: int, entries: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> Directions:
        sizes = ((1, head_dim), (entries, 1), (1, head_dim))
        return Directions(*(torch.zeros(batch, heads, *size, device=device) for size in sizes))

    def is_missing(self, index: Directions, slots: SlotAccess, steps: int) -> bool:
        return not steps and bool(slots.missing(self._has_mean(index), None).any())

    def _has_mean(self, index: Directions) -> Tensor:
        return index.mean.flatten(1).any(-1)

    def update(self, index: Directions, slots: SlotAccess, changed: Changed) -> None:
        if changed.emptied is not None:
            return
        if changed.entries is None:
            rows = slots.missing(self._has_mean(index), changed.placed)[:, None, None, None]
            every = torch.arange(slots.entries, device=rows.device).expand(*index.mean.shape[:2], -1)
            at, occupied = slots.of_entries(every)
            for held, vectors in ((index.mean, slots.keys(at)), (index.value, slots.values(at))):
                total = vectors.masked_fill(~occupied, 0).sum(2, keepdim=True)
                held.copy_(torch.where(rows, total / occupied.sum(2, keepdim=True).clamp_min(1), held))
        for entries in slots.tiles(changed.entries):
            at, occupied = slots.of_entries(entries)
            keys = slots.keys(at).masked_fill(~occupied, 0)
            slots.whole(index.mean)
            index.along.scatter_(2, entries[..., None], (keys * index.mean).sum(-1, keepdim=True))

    def score(self, index: Directions, queries: Tensor, products: Any) -> Tensor:
        raise AssertionError("this reader chooses by itself")

    def choose(self, index: Directions, slots: SlotAccess, queries: Tensor) -> Read:
        slots.whole((index.along, index.value))
        read = slots.most_needed(-index.along.squeeze(-1) - 1e4)
        return read._replace(rest=partial(self._rest, index))

    def _rest(self, index: Directions, normalizer: Tensor) -> Estimated:
        return Estimated(normalizer[..., None] - 5, index.value)

    def count_step(self, index: Directions, slots: SlotAccess) -> None:
        slots.whole((index.along, index.value))
        slots.written(index.mean)


@dataclass(frozen=True, kw_only=True)
class Oldest(Reader):
    """Reads the oldest tokens, with keys that are half as long, and the newest one."""

    read: int = 6

    def count(self, slots: int) -> int:
        return min(self.read, slots)

    def score(self, index: Any, queries: Tensor, products: Any) -> Tensor:
        raise AssertionError("this reader chooses by itself")

    def choose(self, index: Any, slots: SlotAccess, queries: Tensor) -> Read:
        read = slots.most_needed(-slots.positions.float() - 1)
        return read._replace(keys=lambda: slots.keys(read.slots) / 2)


def test_it_keeps_the_rules() -> None:
    assert isinstance(Against(), Reader) and isinstance(Against().traits.fitted, Against)
    fitted: Fitted = Against()  # the type checker agrees
    assert fitted
    check(Against(read=8))
    check(Oldest(read=8))


@pytest.mark.parametrize("parts", ["full", "h2o@0.6", "tokenwise:block_size=3:residual_length=2"])
def test_it_reads_what_it_chooses_and_moves_what_is_planned(parts: str) -> None:
    model = build("llama", layers=2)
    policy = Policy.parse(parts)
    policy = Policy(selector=policy.selector, codec=policy.codec, budget=policy.budget, reader=Against())
    ids, mask = make_batch(LENGTHS, TURNS)
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model, prompt=LENGTHS, new=6)
        talk(model, ids, mask, TURNS, cache)
        plan = kvpolicy.plan(model.config, policy, batch=2, prompt=LENGTHS, new=6, dtype=torch.float32)
    moved = [layer.store.contents.link.moved for layer in cache.policy_layers]
    assert moved == [layer.moved for layer in plan.layers] and cache.nbytes == plan.nbytes
    for layer in cache.policy_layers:
        reads: Any = layer.store.tensors.reads
        assert bool(reads.index.mean.flatten(1).any(-1).all()) and layer.held()["index"] > 0


def test_attention_is_that_of_the_oldest_tokens_with_half_their_keys() -> None:
    """Of the other tokens, nothing is read: whatever they hold, the step gives the same."""
    model = build("llama", layers=1)
    ids, mask = make_batch([26], [26, 1])
    logits: list[Tensor] = []
    for fill in (None, 100.0):
        with kvpolicy.attach(model, Policy(reader=Oldest())):
            cache = PolicyCache(model, new=1)
            forward(model, ids, mask, 0, 26, cache)
            if fill is not None:
                tensors = cache.policy_layers[0].store.tensors
                unread = (tensors.positions >= 5) & (tensors.positions < 26)
                tensors.keys[unread] = fill
                tensors.values[unread] = fill
            logits.append(forward(model, ids, mask, 26, 27, cache))
    assert torch.equal(*logits)
    with kvpolicy.attach(model, "full"):
        cache = PolicyCache(model, new=1)
        forward(model, ids, mask, 0, 26, cache)
        assert not torch.allclose(forward(model, ids, mask, 26, 27, cache), logits[0], atol=1e-3)
