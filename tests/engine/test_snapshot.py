"""The content of a store, of which each rank takes its heads; `tests/files` has caches that are saved and loaded."""

from __future__ import annotations

import pytest
import torch

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.engine import snapshot
from kvpolicy.engine.head_cut import Heads, cut
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.reading import Board
from kvpolicy.engine.snapshot import Snapshot
from kvpolicy.protocols import SINGLE_RANK
from tests.conformance.models import build
from tests.engine.parts import index_of
from tests.readers.bench import Layer, draw


def test_layers_that_share_a_choice_go_on_sharing_it() -> None:
    """Two layers hold the same tokens in the same slots, which the second one makes use of."""
    policy = "streaming:sinks=2+reuse:every=2:dense=0:full=false/exact:read=6@0.5"
    boards = [Board(), Board()]
    pairs = [[Layer(policy, [13], layer_idx=index, board=board) for index in (0, 1)] for board in boards]
    for layer in pairs[0]:
        layer.prompt(*draw(26, layer.store.layer_idx))
    for one, other in zip(*pairs, strict=True):
        snapshot.put(other.store, snapshot.take(one.store), SINGLE_RANK, torch.float32, torch.device("cpu"))
        assert index_of(other.store).same_slots == index_of(one.store).same_slots == (one.store.layer_idx == 1)


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
