"""Tensors of a layer that are allocated without keys are like those that a store makes of a prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy import AdaKV, Policy
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_tensors import LayerTensors, alloc_index
from kvpolicy.engine.snapshot import named_tensors
from kvpolicy.protocols import LayerShape, Layout, State
from tests.engine.paged import DIM, GROUP, HEADS, Run
from tests.readers.bench import Layer, draw

PROMPT = 40


def described(parts: dict[str, State]) -> dict[str, tuple[Any, Any]]:
    """Shape and dtype of every tensor by name."""
    named = [pair for name, part in parts.items() for pair in named_tensors(part, name)]
    return {name: (t.shape, t.dtype) for name, t in named}


@pytest.mark.parametrize(
    "policy",
    ["h2o@0.5", "full+kivi:group_size=4:residual_length=4", "h2o+merge@0.5", "full+quest:read=6:page=2:dense=0"],
)
def test_slots_on_meta_are_those_of_a_store(policy: str) -> None:
    layer = Layer(policy, [PROMPT // 2])
    layer.prompt(*draw(PROMPT, 1))
    store = layer.store
    shape = LayerShape(store.shape.heads, store.shape.head_dim, torch.float32)
    meta = LayerTensors.of_slots(store.spec, 1, shape, store.layout, "meta")
    assert described(meta.parts()) == described(store.tensors.parts())
    assert meta.nbytes_by_kind() == store.nbytes_by_kind()


@pytest.mark.parametrize("codec", ["plain", "tokenwise:group_size=2:residual_length=4:block_size=4"])
def test_pages_on_meta_are_those_of_a_store(codec: str) -> None:
    run = Run("h2o", AdaKV(), [40], codec=codec)
    run.prompt([60])
    run.store.geometry.set_numbers(run.store.geometry.numbers())
    meta = run.store.geometry.alloc(1, LayerShape(HEADS, DIM, torch.float32, GROUP), "meta")
    assert described(meta.parts()) == described(run.store.tensors.parts())
    assert meta.nbytes_by_kind() == run.store.nbytes_by_kind()


def test_a_layer_that_reads_everything_has_no_index() -> None:
    policy = Policy.parse("full")
    assert (
        alloc_index(LayerSpec(0, policy.selector, policy.codec), 1, LayerShape(2, 4, torch.float32), Layout(8), "cpu")
        == ()
    )


def test_limits_without_rows_stay_as_they_are() -> None:
    policy = Policy.parse("full+kivi:group_size=4:residual_length=4")
    spec = LayerSpec(0, policy.selector, policy.codec)
    held = LayerTensors.of_slots(spec, 2, LayerShape(2, 4, torch.float32), Layout(4, (8,)), "cpu")
    assert held.limits is not None and not held.limits.block.shape[0]
    columns = held.columns
    held.map_rows(lambda t: t[[1, 0, 1]])
    assert held.columns is columns and held.length.shape == (3,) and held.limits.flush_threshold.shape == (3, 1)
    assert not held.limits.block.shape[0]
