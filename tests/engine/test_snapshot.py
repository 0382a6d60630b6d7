"""The content of a store, taken and put."""

from __future__ import annotations

import pytest
import torch

from kvpolicy import H2O, KIVI, KVPolicyError
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.snapshot import named_tensors, put, take
from kvpolicy.protocols import SINGLE_RANK
from tests.engine.parts import Worth


def filled() -> LayerStore:
    store = LayerStore(LayerSpec(0, H2O(), KIVI(group_size=4, residual_length=4), "evict"))
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
    other = LayerStore(LayerSpec(0, H2O(), KIVI(group_size=4, residual_length=4), "evict"))
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
    empty = LayerStore(LayerSpec(0, H2O(), KIVI(group_size=4, residual_length=4), "evict"))
    with pytest.raises(KVPolicyError, match="must fit the policy and the model"):
        put(empty, taken, SINGLE_RANK, torch.float32, torch.device("cpu"))
