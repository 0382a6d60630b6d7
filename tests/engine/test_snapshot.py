"""The content of a store, taken and put; inside a period of scheduled work, too."""

from __future__ import annotations

import json

import pytest
import torch

from kvpolicy import H2O, KIVI, AdaKV, KVPolicyError
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.reading import Board
from kvpolicy.engine.snapshot import Snapshot, named_tensors, put, take
from kvpolicy.protocols import SINGLE_RANK
from tests.engine.paged import Run
from tests.engine.parts import Worth, index_of
from tests.readers.bench import Layer, draw

SPEC = LayerSpec(0, H2O(), KIVI(group_size=4, residual_length=4), "evict")


def filled() -> LayerStore:
    store = LayerStore(SPEC)
    store.initialize(torch.empty(1, 2, 0, 8), group=3)
    return store


def test_names_follow_fields_and_places() -> None:
    a = torch.zeros(1)
    b = torch.ones(2)
    c = torch.ones(3)
    found = dict(named_tensors((Worth(a, b), (c,)), "codes"))
    assert [*found] == ["codes.0.worth", "codes.0.number", "codes.1.0"] and found["codes.1.0"] is c


def test_a_store_takes_what_another_held() -> None:
    one = filled()
    other = LayerStore(SPEC)
    one.tensors.length.fill_(9)
    put(other, take(one), SINGLE_RANK, torch.float32, torch.device("cpu"))
    assert other.is_initialized and other.shape.group == 3 and other.tensors.length is one.tensors.length


@pytest.mark.parametrize("change", ["missing", "shape", "dtype", "numbers"])
def test_what_does_not_fit_is_refused(change: str) -> None:
    taken = take(filled())
    if change == "missing":
        del taken.tensors["length"]
    elif change == "shape":
        taken.tensors["length"] = torch.zeros(2, dtype=torch.int64)
    elif change == "dtype":
        taken.tensors["length"] = torch.zeros(1)
    else:
        del taken.numbers["layout"]
    empty = LayerStore(SPEC)
    with pytest.raises(KVPolicyError, match="must fit the policy and the model"):
        put(empty, taken, SINGLE_RANK, torch.float32, torch.device("cpu"))


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
    content = Snapshot(tensors, json.loads(json.dumps(taken.numbers)))
    put(empty, content, SINGLE_RANK, torch.float32, store.tensors.keys.device)


@pytest.mark.parametrize("name", POLICIES)
def test_every_later_step_gives_the_same_bits(name: str) -> None:
    one, other = (Layer(POLICIES[name], [14, 9], new=2) for _ in range(2))
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


@pytest.mark.parametrize(
    ("grows", "codec"), [(True, "plain"), (False, "tokenwise:group_size=2:residual_length=3:block_size=4")]
)
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
