"""`PolicyCache.hold_next`: a forward that is added whole, beyond the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError, Policy, PolicyCache
from kvpolicy.engine.invariants import check_invariants
from kvpolicy.hf.budgets import BEYOND_BUDGET
from kvpolicy.text.errors import KVPolicyStateError
from tests.conformance.access import kept_positions
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch
from tests.engine.filled import attached, prompted

TURNS = [40, 7, 1, 1, 6, 9, 1]
"""A prompt, a question, an answer, another question, a prompt that competes, and a step."""

HOLDS = {1, 4}
"""The turns that are added whole."""

PLANNED = ["snapkv:window=4@0.3", "snapkv:window=4:decode=grow@0.3", "full+kivi:bits=4:group_size=4:residual_length=4"]

LAYERED = ["h2o@0.3", "uniform/adakv+snapkv:window=4@0.4"]
POLICIES = [
    Policy.by_layer(LAYERED, budget=0.5),
    "window@0.3",
    "snapkv:window=4@0.3",
    "snapkv:window=4:decode=grow@0.3",
    "keydiff:every=2@0.3",
    "kvzip:chunk=9@0.3",
    "full",
    "squeeze+h2o@0.3",
    "kvcompose+kvzip:chunk=9@0.3",
    "uniform/adakv+snapkv:window=4@0.4",
    "uniform/adakv+snapkv:window=4:decode=grow@0.4",
    "uniform/adakv+h2o+tokenwise@0.4",
    "snapkv:window=4+kivi:bits=4:group_size=4:residual_length=4@0.4",
    "h2o+mikv@0.4",
    "snapkv:window=4+merge@0.3",
    "h2o@4096",
    "full+quest:page=4:read=8",
]


def held(cache: PolicyCache, layer: int, row: int) -> list[set[int]]:
    return [set(head) for head in kept_positions(cache.policy_layers[layer])[row]]


def talk(model: Any, cache: PolicyCache, lengths: list[int]) -> list[Tensor]:
    """Logits of each turn."""
    ids, mask = make_batch(lengths, TURNS)
    logits: list[Tensor] = []
    start = 0
    for number, size in enumerate(TURNS):
        before = [[held(cache, layer, row) for row in range(len(lengths))] for layer in range(2)] if number else []
        if number in HOLDS:
            cache.hold_next()
        logits.append(forward(model, ids, mask, start, start + size, cache))
        start += size
        for layer in cache.policy_layers:
            check_invariants(layer.store)
        # A prompt that competes again evicts tokens, but no slot goes away.
        assert cache.plan is not None and cache.plan.nbytes == cache.nbytes, number
        if number not in HOLDS:
            continue
        assert BEYOND_BUDGET in cache.plan.note
        for layer, rows in enumerate(before):
            for row, heads in enumerate(rows):
                last = int(cache.policy_layers[layer].length[row])
                for was, now in zip(heads, held(cache, layer, row), strict=True):
                    assert now == was | set(range(last - size, last))
    return logits


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_everything_is_kept_until_the_next_prompt(policy: str | Policy) -> None:
    """Of padded rows, with one token and several, and answers in between; a row is as alone."""
    model = build("llama", layers=2)
    lengths = [40, 23]
    with kvpolicy.attach(model, policy):
        both = PolicyCache(model, new=sum(TURNS[1:]))
        logits = talk(model, both, lengths)
        assert both.plan is not None and BEYOND_BUDGET not in both.plan.note
        for row, length in enumerate(lengths):
            check_alone(model, lengths, row, 40 - length, logits)


def check_alone(model: Any, lengths: list[int], row: int, pads: int, logits: list[Tensor]) -> None:
    """Hold the logits of a row [B, n, V] of each turn against those of the row without the other, and its padding."""
    ids, mask = (t[row : row + 1, pads:] for t in make_batch(lengths, TURNS))
    cache = PolicyCache(model, new=sum(TURNS[1:]))
    stop = -pads
    for number, size in enumerate(TURNS):
        start = max(stop, 0)
        stop += size
        if number in HOLDS:
            cache.hold_next()
        own = forward(model, ids, mask, start, stop, cache)[0]
        torch.testing.assert_close(logits[number][row, -len(own) :], own, atol=2e-4, rtol=1e-3)


def test_a_question_of_one_token() -> None:
    with attached("window@10", [40], [40, 1, 1], layers=2) as (model, ids, mask):
        cache = prompted(model, ids, mask, 40)
        cache.hold_next()
        forward(model, ids, mask, 40, 41, cache)
        assert held(cache, 0, 0)[0] == set(range(30, 41))
        forward(model, ids, mask, 41, 42, cache)
        assert held(cache, 0, 0)[0] == set(range(31, 42))


def test_a_plan_counts_it() -> None:
    model = build("llama", layers=2)
    ids, mask = make_batch([40], [40, 7, 1])
    for policy in PLANNED:
        planned = kvpolicy.plan(model, policy, prompt=40, held_next=7, new=1)
        with kvpolicy.attach(model, policy):
            cache = prompted(model, ids, mask, 40, new=8)
            cache.hold_next()
            forward(model, ids, mask, 40, 47, cache)
        assert (
            planned.nbytes == cache.nbytes and planned.full_nbytes > kvpolicy.plan(model, policy, prompt=40).full_nbytes
        )
    with pytest.raises(KVPolicyError, match="held_next must be 0 for a policy with budgets by head"):
        kvpolicy.plan(model, "uniform/adakv+h2o@0.3", prompt=40, held_next=7)


@pytest.mark.parametrize(
    "policy", ["uniform/adakv+kvzip:decode=grow:chunk=9@0.3", "global/adakv+kvzip:decode=grow:chunk=9@0.3"]
)
def test_heads_of_a_growing_cache_get_slots_for_what_is_added(policy: str) -> None:
    """As many pages as the new tokens need, however many tokens the fullest head holds, and none that are free."""
    model = build("llama", layers=2)
    ids, mask = make_batch([40, 33], [40, 7])
    for announced in (0, 7):
        with kvpolicy.attach(model, policy):
            cache = prompted(model, ids, mask, 40, prompt=mask[:, :40].sum(-1), new=announced)
            before = [layer.store.tensors.positions.shape for layer in cache.policy_layers]
            assert any(len({*map(len, held(cache, layer, 0))}) > 1 for layer in range(2))
            cache.hold_next()
            forward(model, ids, mask, 40, 47, cache)
        for layer, (_, pages, size) in zip(cache.policy_layers, before, strict=True):
            more = -(-(7 - announced) // size) * layer.store.contents.shape.heads
            assert layer.store.tensors.positions.shape[1:] == (pages + more, size)


def test_it_must_follow_a_prompt() -> None:
    with attached("kvzip:chunk=9@0.3", [40], [40, 7], layers=2) as (model, ids, mask):
        cache = PolicyCache(model, prompt=47)
        with pytest.raises(KVPolicyStateError, match=r"must hold a whole prompt before hold_next\(\)"):
            cache.hold_next()
        forward(model, ids, mask, 0, 40, cache)  # a chunk of the announced prompt
        with pytest.raises(KVPolicyStateError, match=r"must hold a whole prompt before hold_next\(\)"):
            cache.hold_next()
        forward(model, ids, mask, 40, 47, cache)
        cache.hold_next()
        with pytest.raises(KVPolicyStateError, match=r"save\(\) must not follow hold_next"):
            cache.save("nowhere.safetensors")
        with pytest.raises(KVPolicyStateError, match=r"mark\(\) must not be called between hold_next"):
            cache.mark(2)
        cache.reset()
        assert not cache.holds_next


def test_copies_and_marks() -> None:
    """A copy holds its next forward too, and a mark refuses to."""
    with attached("window@10", [40], [40, 7], layers=2) as (model, ids, mask):
        cache = prompted(model, ids, mask, 40)
        cache.hold_next()
        other = cache.fork()
        for one in (cache, other):
            forward(model, ids, mask, 40, 47, one)
            assert len(held(one, 1, 0)[0]) == 17
        cache.mark(2)
        with pytest.raises(KVPolicyStateError, match=r"hold_next\(\) must be called without a mark"):
            cache.hold_next()


@pytest.mark.parametrize("policy", ["h2o@8", PLANNED[2], "uniform/adakv+h2o@24"])
def test_a_plan_after_a_file_has_the_slots_that_stay(policy: str, tmp_path: Path) -> None:
    model = build("llama")
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = PolicyCache(model, prompt=25, new=20)
        model(torch.randint(3, 40, (1, 25)), cache=cache)
        cache.hold_next()
        model(torch.randint(3, 40, (1, 8)), cache=cache)
        cache.save(tmp_path / "cache")
        cache = PolicyCache.load(model, tmp_path / "cache")
        for size in (9, 1):
            model(torch.randint(3, 40, (1, size)), cache=cache)
            assert cache.plan is not None and cache.plan.nbytes == cache.nbytes
