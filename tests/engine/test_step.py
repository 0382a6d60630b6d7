"""A step that later layers have read: the selector sees what the queries of all of them attend to, at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy import Policy
from kvpolicy.engine.decode import Step
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.engine.state import tensors
from kvpolicy.planning.memory import layer_spec
from kvpolicy.statistics.windows import ScoreTransform
from tests.engine.parts import generator

ROWS = 2
HEADS = 2
GROUP = 2
DIM = 8
PROMPT = 12
KEPT = 8
TRANSFORM = ScoreTransform(0.7)


def drawn(heads: int, columns: int, seed: int) -> Tensor:
    return torch.randn(ROWS, heads, columns, DIM, generator=generator(seed))


def filled(policy: str, group: int) -> LayerStore:
    """A layer behind a prompt in which the second half of each group repeats the first, so that all rank alike."""
    store = LayerStore(layer_spec(Policy.parse(policy), 0))
    q = drawn(HEADS * GROUP, PROMPT, 1)
    k = drawn(HEADS, PROMPT, 2)
    v = drawn(HEADS, PROMPT, 3)
    q = q.unflatten(1, (HEADS, GROUP)).repeat(1, 1, group // GROUP, 1, 1).flatten(1, 2)
    store.initialize(k, group=group)
    _, pending = store.attend_prompt(q, k, v, None, TRANSFORM)
    keep = torch.full((ROWS,), KEPT)
    store.compress(pending, RowBudget(keep, torch.zeros_like(keep), keep))
    return store


@pytest.mark.parametrize("policy", ["tova@8", "quest:read=0.5:page=1:dense=0+window@8", "window@8"])
def test_a_layer_that_is_read_is_one_with_more_heads(policy: str) -> None:
    """Of slots, outputs and states, in steps that evict, while queries of both layers differ."""
    alone = filled(policy, 2 * GROUP)
    joint = filled(policy, GROUP)
    for number in range(5):
        own = drawn(HEADS * GROUP, 1, 10 + number)
        other = drawn(HEADS * GROUP, 1, 20 + number)
        k = drawn(HEADS, 1, 30 + number)
        v = drawn(HEADS, 1, 40 + number)
        both = torch.cat([own.unflatten(1, (HEADS, -1)), other.unflatten(1, (HEADS, -1))], 2).flatten(1, 2)
        expected = alone.append(both, k, v, None, TRANSFORM).unflatten(1, (HEADS, -1))
        first, step = joint.attend_step(own, k, v, None, TRANSFORM)
        assert isinstance(step, Step)
        second, step = joint.read(other, TRANSFORM, step)
        joint.end_step(step)
        for store in (alone, joint):
            store.count_step()
        if "quest" not in policy:  # of which each layer chooses what it reads by itself
            found = torch.cat([first.unflatten(1, (HEADS, -1)), second.unflatten(1, (HEADS, -1))], 2)
            assert torch.allclose(found, expected, atol=1e-6)
            assert torch.equal(alone.tensors.positions, joint.tensors.positions)
            for one, two in zip(tensors(alone.tensors.state), tensors(joint.tensors.state), strict=True):
                assert torch.allclose(one, two, atol=1e-6)
        own_choice = joint.slots.reads.attend(other, TRANSFORM, False)[0] if joint.slots is not None else None
        assert own_choice is not None and torch.allclose(second, own_choice, atol=1e-6)
