"""Some heads of a layer, cut out of a snapshot of all heads; tests/parallel/test_whole_files.py compares with ranks."""

from __future__ import annotations

import pytest
import torch

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.engine import snapshot
from kvpolicy.engine.head_cut import Heads, cut
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.snapshot import Snapshot
from kvpolicy.protocols import SINGLE_RANK
from tests.conformance.models import build

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
