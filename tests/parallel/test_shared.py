"""Rows that share a text on several ranks answer as on one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kvpolicy
from kvpolicy import PolicyCache
from tests.parallel.ranks import run_ranks
from tests.parallel.sliced import Heads, divided, pair_of
from tests.sampling import product

TEXT = 26
QUESTION = 5
STEPS = 3
ROWS = 3
POLICIES = ["snapkv:window=6@0.5", "h2o+tokenwise:residual_length=2:block_size=3@0.5", "uniform/adakv+h2o@0.5"]


def _play(model: Any, policy: str) -> tuple[PolicyCache, list[Tensor]]:
    """The cache of the rows, and the logits of their question and answer."""
    draw = torch.Generator().manual_seed(5)
    text, questions = (torch.randint(3, 64, size, generator=draw) for size in ((1, TEXT), (ROWS, QUESTION)))
    steps = torch.randint(3, 64, (ROWS, STEPS), generator=draw)
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        model(text, cache=cache)
        rows = cache.fork([0] * ROWS, shared=True)
        return rows, [model(ids, cache=rows).logits for ids in (questions, *steps.split(1, 1))]


def _compare(rank: int, world: int, heads: Heads) -> list[float]:
    """The largest difference of each policy on this rank."""
    model, alone = pair_of(heads)
    found: list[float] = []
    for policy in POLICIES:
        one, want = _play(alone, policy)
        with divided(heads, rank, world):
            some, got = _play(model, policy)
        assert some.plan is not None and some.plan.nbytes == some.nbytes <= one.nbytes
        found.append(max(float((a - b).abs().max()) for a, b in zip(want, got, strict=True)))
    return found


HEADS = [Heads(4, 2), Heads(6, 3), Heads(4, 1, replicas=2), Heads(2, 1)]


@product("heads", HEADS, sample=[(HEADS[1],), (HEADS[2],)], ids=str)
def test_two_ranks_answer_as_one(heads: Heads) -> None:
    """Even heads, three over two, one that both hold, and one that one of them holds."""
    for rank in run_ranks(_compare, 2, heads):
        assert max(rank) < 1e-4
