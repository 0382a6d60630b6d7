"""What a layer holds can be listed and set again."""

from __future__ import annotations

import json

import torch

from kvpolicy import H2O, KIVI
from kvpolicy.engine.contents import NUMBERS, PARTS, LayerContents
from kvpolicy.engine.state import tensors
from kvpolicy.engine.store import LayerStore


def test_parts_are_all_tensors_and_set_again() -> None:
    store = LayerStore(0, H2O(), KIVI(), "evict")
    store.initialize(torch.empty(2, 3, 0, 8))
    assert isinstance(store, LayerContents) and [*store.parts()] == [*PARTS]
    listed = {id(t) for part in store.parts().values() for t in tensors(part)}
    held = [t for name, value in vars(store).items() if name != "calibrations" for t in _reach(value)]
    assert held and {id(t) for t in held} == listed
    other = store.length + 1
    store.set_part("length", other)
    assert store.length is other
    store.set_part("limits", ())
    assert store.limits is None and store.parts()["limits"] == ()


def test_numbers_pass_through_json() -> None:
    store = LayerStore(0, H2O(), KIVI(), "evict")
    store.initialize(torch.empty(2, 3, 0, 8))
    numbers = store.numbers()
    assert {name.lstrip("_") for name in NUMBERS} <= numbers.keys()
    numbers |= {"capacity": 77, "expected_len": [5, 6], "layout": [8, [32]], "free_steps": None}
    store.set_numbers(json.loads(json.dumps(numbers)))
    assert store.capacity == 77 and store.expected_len == [5, 6] and store.layout.coded == (32,)
    assert store.numbers() == numbers


def _reach(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for part in value for t in _reach(part)] if isinstance(value, tuple) else []
