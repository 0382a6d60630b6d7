"""The content of a store, taken and put; inside a period of scheduled work, too."""

from __future__ import annotations

import json

import pytest
import torch

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.engine import snapshot
from kvpolicy.engine.head_cut import Heads, cut
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.reading import Board
from kvpolicy.engine.snapshot import Snapshot, put, take
from kvpolicy.protocols import SINGLE_RANK
from tests.conformance.models import build
from tests.engine.parts import index_of
from tests.readers.bench import Layer, draw


def restored(store: LayerStore, empty: LayerStore) -> None:
    """Give an empty store what another one holds, as a file would."""
    taken = take(store)
    tensors = {name: t.clone() for name, t in taken.tensors.items()}
    content = Snapshot(tensors, json.loads(json.dumps(taken.numbers)))
    put(empty, content, SINGLE_RANK, torch.float32, store.tensors.keys.device)


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


POLICIES = ["h2o@0.5", "uniform/adakv+h2o@0.5", "uniform/adakv+h2o+tokenwise:residual_length=2:block_size=3@0.5"]


def stores(policy: str) -> tuple[Snapshot, LayerStore, LayerStore]:
    """The content of the first layer behind a prompt, and two empty stores of it."""
    model = build("llama", layers=2)
    ids = torch.arange(3, 43)[None]
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        model(ids, cache=cache)
        scratch = PolicyCache(model).policy_layers[0].store
        return snapshot.take(cache.policy_layers[0].store), scratch, PolicyCache(model).policy_layers[0].store


def positions(store: LayerStore) -> list[list[int]]:
    """The tokens that each head holds."""
    return [sorted(head[head >= 0].tolist()) for head in store.geometry.head_positions()[0]]


@pytest.mark.parametrize("policy", POLICIES)
def test_each_head_holds_what_it_held(policy: str) -> None:
    whole, scratch, store = stores(policy)
    snapshot.begin(scratch, whole, SINGLE_RANK, torch.float32, torch.device("cpu"))
    snapshot.put(store, whole, SINGLE_RANK, torch.float32, torch.device("cpu"))
    every = positions(store)
    batch, heads, dim = whole.numbers["shape"]
    found: list[list[int]] = []
    for head in range(heads):
        _, scratch, own = stores(policy)
        snapshot.begin(scratch, whole, SINGLE_RANK, torch.float32, torch.device("cpu"))
        part = cut(scratch, whole, Heads(head, 1, whole.numbers["group"]))
        assert part.numbers["shape"] == [batch, 1, dim]
        snapshot.put(own, part, SINGLE_RANK, torch.float32, torch.device("cpu"))
        found += positions(own)
    assert found == every


def _without(whole: Snapshot, name: str) -> Snapshot:
    return whole._replace(tensors={key: value for key, value in whole.tensors.items() if key != name})


@pytest.mark.parametrize("policy", POLICIES)
def test_what_does_not_fit_is_refused(policy: str) -> None:
    whole, scratch, _ = stores(policy)
    short = whole._replace(tensors=whole.tensors | {"positions": whole.tensors["positions"][:, :1]})
    other = whole._replace(numbers={**whole.numbers, "layout": [3, []], "pages": [-1, 4]})
    for each in (_without(whole, "positions"), _without(whole, "values"), short, other):
        with pytest.raises(KVPolicyError, match="must fit the policy and the model"):
            snapshot.begin(scratch, each, SINGLE_RANK, torch.float32, torch.device("cpu"))
            cut(scratch, each, Heads(0, 1, 1))


STEPS = 12
SCHEDULED = {
    "ranked again every 5 tokens": "keydiff:every=5@0.5",
    "sorted again every 5 steps": "snapkv+quest:read=6:page=2:dense=0:resort=5@0.5",
    "recoded every 5 tokens": "h2o+zipcache:recode_every=5@0.5",
    "demoted in blocks": "h2o+tokenwise:block_size=5:residual_length=2@0.5",
    "grown as it goes": "full+kivi:group_size=4:residual_length=5",
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_every_later_step_gives_the_same_bits(name: str) -> None:
    one, other = (Layer(SCHEDULED[name], [14, 9], new=2) for _ in range(2))
    q, k, v = draw(26, 1, batch=2)
    one.prompt(q, k, v, torch.arange(26) >= torch.tensor([[0], [7]]))
    one.store.ensure_capacity()
    for step in range(3):
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
