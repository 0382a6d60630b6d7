"""What a layer holds can be listed and set again."""

from __future__ import annotations

import pytest
import torch

from kvpolicy import H2O, KIVI, AdaKV, Policy
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.layer_tensors import LayerTensors, PageTensors
from kvpolicy.engine.state import tensors
from kvpolicy.protocols import HeadAllocator, LayerShape, Layout


def layer(heads: HeadAllocator | None = None) -> LayerStore:
    """A layer of two rows, before its first prompt."""
    store = LayerStore(LayerSpec(0, H2O(), KIVI(), heads=heads))
    store.initialize(torch.empty(2, 3, 0, 8))
    return store


@pytest.mark.parametrize("heads", [None, AdaKV()])
def test_parts_are_all_tensors_and_set_again(heads: HeadAllocator | None) -> None:
    store = layer(heads)
    held = store.tensors
    listed = {id(t) for part in held.parts().values() for t in tensors(part)}
    assert listed == {id(t) for t in _reach(held)}
    other = held.length + 1
    held.set_part("length", other)
    assert held.length is other
    held.set_part("limits", ())
    assert held.limits is None and held.parts()["limits"] == ()
    assert ("owner" in held.parts()) == (heads is not None)
    if heads is not None:
        owner = held.paged().owner.clone()
        held.set_part("owner", owner)
        assert held.paged().owner is owner and held.parts()["owner"] is owner


def test_pages_are_asked_for_only_where_there_are_some() -> None:
    with pytest.raises(AssertionError, match="no budgets of their own"):
        layer().tensors.paged()


def test_limits_without_rows_stay_as_they_are() -> None:
    policy = Policy.parse("full+kivi:group_size=4:residual_length=4")
    spec = LayerSpec(0, policy.selector, policy.codec)
    held = LayerTensors.of_slots(spec, 2, LayerShape(2, 4, torch.float32), Layout(4, (8,)), "cpu")
    assert held.limits is not None and not held.limits.block.shape[0]
    columns = held.columns
    held.map_rows(lambda t: t[[1, 0, 1]])
    assert held.columns is columns and held.length.shape == (3,) and held.limits.flush_threshold.shape == (3, 1)
    assert not held.limits.block.shape[0]


def _reach(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, LayerTensors | PageTensors):
        value = tuple(vars(value).values())
    return [t for part in value for t in _reach(part)] if isinstance(value, tuple) else []
