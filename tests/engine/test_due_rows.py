"""Block work of a batch of many lengths: each row is encoded when it is due, and no other one with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import PolicyCache
from kvpolicy.engine import layer_store, reranking
from kvpolicy.engine.due_rows import Rows, due_rows
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.state import tensors
from kvpolicy.protocols import View, rerank_every
from kvpolicy.registry import lookup
from kvpolicy.testing import check_cache
from tests.conformance.models import layers_for
from tests.conformance.policies import CODECS, SELECTORS, words
from tests.engine.filled import attached, prompted, steps
from tests.sampling import product

LENGTHS = [38, 37, 36, 35, 33, 32, 31, 30]
IDLE = [0, 3, 1, 2, 2, 0, 3, 1]
"""Steps that each row waits after its prompt: blocks of one token each are demoted at other steps then."""
STEPS = 20
BLOCKS = [name for name in CODECS if lookup(name)[1]().traits.block]
"""Codecs that demote tokens."""
RERANKING = [name for name in SELECTORS if rerank_every(lookup(name)[1]())]


def run(policy: str, prefilled: Callable[[PolicyCache], None] = lambda cache: None) -> tuple[PolicyCache, Tensor]:
    """The cache after a ragged prompt, when it is shown, and decode steps, and the logits of these."""
    turns = [LENGTHS[0]] + [1] * STEPS
    with attached(policy, LENGTHS, turns, layers=layers_for(policy)) as (model, ids, mask):
        for row, count in enumerate(IDLE):
            mask[row, LENGTHS[0] : LENGTHS[0] + count] = 0
        cache = prompted(model, ids, mask, LENGTHS[0], prompt=LENGTHS, new=STEPS)
        prefilled(cache)
        logits = steps(model, ids, mask, LENGTHS[0], sum(turns), cache)
    check_cache(cache)
    return cache, logits


def of_all_rows(due: Tensor | None) -> list[Rows]:
    """`due_rows` as if one due row made the work of all."""
    if due is None or not bool(due.any()):
        return []
    return [Rows([*range(len(due))], slice(0, len(due)))]


@pytest.mark.parametrize(
    ("due", "parts"),
    [
        ([], []),
        ([3], [[3]]),
        ([2, 3, 4], [[2, 3, 4]]),
        ([0, 5], [[0, 5]]),
        ([0, 1, 2, 3, 4, 5, 6, 7], [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ([0, 2, 3, 4, 7], [[0, 2], [3, 4], [7]]),
    ],
)
def test_due_rows_come_in_ranges_or_in_small_parts(due: list[int], parts: list[list[int]]) -> None:
    found = due_rows(torch.tensor([row in due for row in range(8)]))
    assert [rows.numbers for rows in found] == parts
    for rows in found:
        assert torch.arange(8)[rows.at].tolist() == rows.numbers
        assert isinstance(rows.at, slice) == (rows.numbers[-1] - rows.numbers[0] < len(rows.numbers))


PAGED = "uniform/adakv+h2o+tokenwise:residual_length=4:block_size=4@0.5"
LOW_RANK = "h2o+gear:bits=4:group_size=4:rank=2:residual_length=4@0.5"
POLICIES = [*(words("h2o", codec) for codec in BLOCKS), PAGED, LOW_RANK]
EVERY = [(policy,) for policy in POLICIES]
READING = [
    "full+kivi:group_size=4:residual_length=4+quest:read=8:page=2:dense=0@1.0",
    "h2o+zipcache:recode_every=5+exact:read=6@0.5",
    "h2o+zipcache:recode_every=5+retrieval:recent=1:read=6:cluster=3:sinks=2@0.5",
    "window+mikv:high=0.3:high_bits=8:residual_length=2:block_size=3+reuse:every=2:dense=0:full=false/exact:read=6@0.5",
    "window+zipcache:recode_every=5+reuse:every=2:dense=0:full=false/exact:read=6@0.5",
]
"""Policies with an index."""


@product("policy", POLICIES, sample=EVERY)
def test_only_due_rows_are_encoded(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step and in each layer, the codec is given the rows that are due, and no others."""
    encoded: list[int] = []
    dues: list[int] = []
    written: list[int] = []
    real = LayerStore.demote

    def demote(self: LayerStore) -> None:
        full = self.geometry.full_rows()
        due = 0 if full is None else int(full.sum())
        encoded.clear()
        real(self)
        assert all(count <= due for count in encoded), f"{due} rows are due, and {encoded} are encoded"
        group = self.contents.group
        demotion = self.spec.codec_traits.demotion
        if len(self.spec.stages) == 1 and (demotion is None or not demotion.recodes):
            waits = group is not None and self.contents.number == 0
            assert sum(encoded) == (0 if waits else due)
        dues.append(due)
        written.append(sum(encoded))

    def watch(cache: PolicyCache) -> None:
        for kind in {type(stage) for layer in cache.policy_layers for stage in layer.store.spec.stages}:
            name = "write_group" if hasattr(kind, "write_group") else "write"
            monkeypatch.setattr(kind, name, counted(getattr(kind, name)))

    def counted(write: Any) -> Any:
        def call(self: Any, *given: Any) -> Any:
            encoded.append(next(len(argument) for argument in given if isinstance(argument, Tensor)))
            return write(self, *given)

        return call

    monkeypatch.setattr(LayerStore, "demote", demote)
    run(policy, watch)
    assert 0 < max(dues) < len(LENGTHS), "some rows are due where others are not"
    assert sum(written)


@product("selector", RERANKING, sample=[(RERANKING[0],), (RERANKING[-1],)])
def test_only_due_rows_are_ranked_again(selector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = words(selector)
    ranked: list[int] = []
    dues: list[int] = []
    real_rank = reranking.rank_again

    def rank(selector: Any, state: Any, seen: Any, view: View) -> None:
        ranked.append(len(view.positions))
        real_rank(selector, state, seen, view)

    monkeypatch.setattr(reranking, "rank_again", rank)
    real = reranking.due_rows

    def noted(due: Tensor | None) -> list[Rows]:
        if due is not None:
            dues.append(int(due.sum()))
        return real(due)

    monkeypatch.setattr(reranking, "due_rows", noted)
    run(policy)
    assert sum(ranked) == sum(dues) > 0 and min(ranked) < len(LENGTHS)


@product("policy", [*POLICIES, *READING], sample=[*EVERY, *((policy,) for policy in READING)])
def test_what_is_held_is_what_work_on_all_rows_would_leave(policy: str) -> None:
    """Bit for bit: logits, and every tensor of every layer."""
    mine, logits = run(policy)
    with pytest.MonkeyPatch.context() as patch:
        for module in (layer_store, reranking):
            patch.setattr(module, "due_rows", of_all_rows)
        whole, others = run(policy)
    assert torch.equal(logits, others)
    for one, other in zip(mine.policy_layers, whole.policy_layers, strict=True):
        assert one.store.contents.numbers() == other.store.contents.numbers()
        parts = other.store.tensors.parts()
        for name, part in one.store.tensors.parts().items():
            if name == "reads":  # `check_cache` computes it again, but for empty slots, whose entries are never read
                continue
            for a, b in zip(tensors(part), tensors(parts[name]), strict=True):
                assert torch.equal(a, b), f"layer {one.layer_idx}, {name}"
