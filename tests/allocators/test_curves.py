"""kvcompose and global: layers are compared by what their tokens are worth."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import KVPolicyError, Policy, PolicyCache
from kvpolicy.allocators.kvcompose import KVCompose
from kvpolicy.allocators.threshold import GlobalThreshold
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.protocols import LayerAttention
from kvpolicy.registry import name_of
from kvpolicy.testing import check
from tests.allocators.test_attention import budgets_in, check_shares
from tests.conformance.models import build
from tests.conformance.play import make_batch, play
from tests.conformance.replay import Turn, reference_selector
from tests.reference import allocators
from tests.reference.engine import PLENTY, ReferenceLayer

BOTH = [KVCompose(), GlobalThreshold()]
KVZIP = "kvzip:chunk=9:sinks=2"
TURNS = [47, 1, 1, 9, 1]
"""A prompt, steps, and a later prompt."""


@pytest.mark.parametrize("allocator", BOTH)
def test_keeps_the_rules(allocator: Any) -> None:
    check(allocator)


def slow_budgets(allocator: Any, worth: list[Any], total: int, floor: int, ceiling: int) -> list[int]:
    name = name_of(type(allocator))
    return allocators.budgets(name, dataclasses.asdict(allocator), worth, total, len(worth), floor, ceiling)


@pytest.mark.parametrize("allocator", BOTH)
@pytest.mark.parametrize("kind", ["random", "equal", "one head", "one layer", "one token"])
def test_as_the_slow_version(allocator: Any, kind: str) -> None:
    """With all worth in one head, one layer or one token too, and at the least budget."""
    worth = torch.rand(5, 3, 20, generator=torch.Generator().manual_seed(0))
    worth = {
        "random": worth,
        "equal": torch.ones_like(worth),
        "one head": worth * torch.tensor([1.0, 0.0, 0.0])[:, None],
        "one layer": worth * (torch.arange(5) == 2)[:, None, None],
        "one token": worth * (torch.arange(20) == 7),
    }[kind]
    worth[:, :, -1] = torch.inf  # the newest token
    none = torch.zeros(1, dtype=torch.int64)
    seen = [LayerAttention(none[:, None], none, none, worth=worth[None, layer], layer_idx=layer) for layer in range(5)]
    curves = torch.stack([allocator.measure(each)[0] for each in seen])[None]
    for total in (10, 23, 50, 99, 100):
        got = allocator.budgets(curves, torch.tensor([total]), 2, torch.tensor([20]), 5)[0].tolist()
        assert got == slow_budgets(allocator, worth.tolist(), total, 2, 20), (kind, total)


@pytest.mark.parametrize("allocator", BOTH)
def test_before_a_prompt_and_without_tokens(allocator: Any) -> None:
    total = torch.tensor([10, 10])
    ceiling = torch.tensor([30, 30])
    assert allocator.budgets(torch.ones(2, 4), total, 1, ceiling, 4).tolist() == [[3, 3, 2, 2]] * 2
    empty = torch.full((2, 4, 6), -torch.inf)
    assert allocator.budgets(empty, total, 1, ceiling, 4).tolist() == [[3, 3, 2, 2]] * 2


def worths(policy: Policy, turns: Sequence[Turn], b: int) -> list[list[list[float]]]:
    """What the tokens of each head of each layer are worth to kvzip after a prompt, of one row."""
    found: list[list[list[float]]] = []
    for turn in turns:
        q, k, v, _ = turn.row(b)
        slow = ReferenceLayer(
            reference_selector(policy.selector), PLENTY, num_heads=q.shape[0], num_kv_heads=k.shape[0], capacity=PLENTY
        )
        texts = [text for text in (replayed.row(b) for replayed in turn.replays) if text is not None]
        slow.forward(q.float(), k.float(), v.float(), turn.kernel.scale, texts=texts)
        found.append([[score.real for score in head] for head in slow.scores])
        for head in found[-1]:
            for position in (0, 1, len(head) - 1):  # the sinks and the newest token
                head[position] = torch.inf
    return found


@pytest.mark.parametrize("name", ["kvcompose", "global"])
def test_in_a_model(name: str) -> None:
    """Rows are alone in their budgets, whatever the padding."""
    policy = Policy.parse(f"{name}+{KVZIP}@0.4")
    lengths = [47, 30]
    tape, cache, _ = play(build("llama", layers=3), policy, lengths, TURNS)
    for b, length in enumerate(lengths):
        turns = [own[0] for own in tape.values()]
        total = allocators.base_budget(0.4, length) * 3
        expected = slow_budgets(policy.allocator, worths(policy, turns, b), total, 1, length + (cache.new or 0))
        assert [turn.keep[b] for turn in turns] == expected
        assert len(set(expected)) > 1


def test_head_budgets_get_what_the_layer_has() -> None:
    """With `adakv` behind it, the tokens of all layers and heads are those above one threshold, but for whole pages."""
    tape, cache, _ = play(build("llama", layers=3), f"global/adakv:safeguard=0.0+{KVZIP}@0.4", [47], TURNS)
    kept = [[len(head) for head in own[0].kept[0]] for own in tape.values()]
    budgets = [own[0].keep[0] for own in tape.values()]
    assert len({count for heads in kept for count in heads}) > 1
    for heads, budget in zip(kept, budgets, strict=True):
        assert sum(heads) <= budget * len(heads)
    assert cache.plan is not None and cache.plan.measured


def test_tiles_and_held_chunks_have_the_budgets_of_one_piece() -> None:
    model = build("llama", layers=3)
    whole = budgets_in(model, f"kvcompose+{KVZIP}@0.3")
    assert budgets_in(model, f"kvcompose+{KVZIP}@0.3", tile=16) == whole
    assert budgets_in(model, f"kvcompose+{KVZIP}@0.3", 3, chunks="hold") == whole


def test_a_later_prompt_has_the_shares_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured again, and held bytes stay within those that are planned."""
    measured: list[int] = []
    real = LayerStore.worth
    monkeypatch.setattr(LayerStore, "worth", lambda *given: (measured.append(1), real(*given))[1])
    tape, cache, _ = play(build("llama", layers=3), f"global+{KVZIP}@0.4", [40], TURNS)
    assert len(measured) == 3
    check_shares(tape, cache, 0.02)


@pytest.mark.parametrize("policy", ["kvcompose+snapkv:window=4@0.2", "global+h2o@30KB"])
def test_chunks_stay_within_the_budget(policy: str) -> None:
    model = build("llama", layers=3)
    ids, _ = make_batch([200], [200], 0)
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = PolicyCache(model, prompt=200, new=0)
        for part in ids.chunk(5, 1):
            model(part, cache=cache)
    assert cache.plan is not None and cache.nbytes == cache.plan.nbytes
    if isinstance(cache.policy.budget, str):
        assert cache.nbytes <= 30 * 1000


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(
        KVPolicyError, match=r"must rank tokens by attention .* across layers, got window.* try kvzip or"
    ):
        Policy.parse("kvcompose+window@0.5")
