"""A layer that is saved inside a period of scheduled work goes on as if it had not been saved, past its end."""

from __future__ import annotations

import json

import pytest
import torch

from kvpolicy.allocators.adakv import AdaKV
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.reading import Board
from kvpolicy.engine.snapshot import Snapshot, put, take
from kvpolicy.protocols import SINGLE_RANK
from tests.engine.paged import Run
from tests.engine.parts import index_of
from tests.readers.bench import Layer, draw

STEPS = 12
POLICIES = {
    "ranked again every 5 tokens": "keydiff:every=5@0.5",
    "sorted again every 5 steps": "snapkv+quest:read=6:page=2:dense=0:resort=5@0.5",
    "recoded every 5 tokens": "h2o+zipcache:recode_every=5@0.5",
    "demoted in blocks": "h2o+tokenwise:block_size=5:residual_length=2@0.5",
    "grown as it goes": "full+kivi:group_size=4:residual_length=5",
}


def restored(store: LayerStore, empty: LayerStore) -> None:
    """Give an empty store what another one holds, as a file would."""
    taken = take(store)
    tensors = {name: t.clone() for name, t in taken.tensors.items()}
    put(
        empty,
        Snapshot(tensors, json.loads(json.dumps(taken.numbers))),
        SINGLE_RANK,
        torch.float32,
        store.tensors.keys.device,
    )


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("before", [0, 3])
def test_every_later_step_gives_the_same_bits(name: str, before: int) -> None:
    one, other = (Layer(POLICIES[name], [14, 9], new=2) for _ in range(2))
    q, k, v = draw(26, 1, batch=2)
    one.prompt(q, k, v, torch.arange(26) >= torch.tensor([[0], [7]]))
    one.store.ensure_capacity()
    for step in range(before):
        one.step(*draw(1, 10 + step, batch=2), valid=torch.tensor([[True], [step != 1]]))
        one.between()
    restored(one.store, other.store)
    for step in range(STEPS):
        new = draw(1, 50 + step, batch=2)
        outs = [layer.step(*new) for layer in (one, other)]
        assert torch.equal(*outs), step
        assert torch.equal(one.store.tensors.positions, other.store.tensors.positions), step
        for layer in (one, other):
            layer.between()


def test_layers_that_share_a_choice_go_on_sharing_it() -> None:
    """Two layers hold the same tokens in the same slots, which the second one makes use of."""
    policy = "streaming:sinks=2+reuse:every=2:dense=0:full=false/exact:read=6@0.5"
    boards = [Board(), Board()]
    pairs = [[Layer(policy, [13], layer_idx=index, board=board) for index in (0, 1)] for board in boards]
    for layer in pairs[0]:
        layer.prompt(*draw(26, layer.store.layer_idx))
    for one, other in zip(*pairs, strict=True):
        restored(one.store, other.store)
        assert index_of(other.store).same_slots == index_of(one.store).same_slots == (one.store.layer_idx == 1)
    for step in range(4):
        for one, other in zip(*pairs, strict=True):
            new = draw(1, 10 * step + one.store.layer_idx)
            assert torch.equal(one.step(*new), other.step(*new))
            one.between()
            other.between()


@pytest.mark.parametrize("codec", ["plain", "tokenwise:group_size=2:residual_length=3:block_size=4"])
@pytest.mark.parametrize("grows", [False, True])
def test_heads_with_budgets_of_their_own(grows: bool, codec: str) -> None:
    run = Run("h2o", AdaKV(), [40, 12], grows=grows, codec=codec)
    run.prompt([60, 33], extra=5 if grows else 0)
    for _ in range(3):
        run.step(valid=[True, False])
    store = run.store
    run.store = LayerStore(store.spec)
    restored(store, run.store)
    for number in range(12):
        run.step(valid=[True, number % 4 != 0])
    run.prompt([9, 0])
    run.step()
