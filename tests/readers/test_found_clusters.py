"""When the clusters of a layer are found, and that they are carried over, counted and brought back."""

from __future__ import annotations

from typing import Any

import torch

import kvpolicy
from kvpolicy import Retrieval
from kvpolicy.engine.layer_slots import LayerSlots
from tests.engine.parts import index_of, slots_of
from tests.readers.bench import Layer, draw
from tests.reference.readers.retrieval import belongs


def index_held(layer: Layer) -> Any:
    """The index of a layer."""
    reads: Any = layer.store.tensors.reads
    return reads.index


def test_rows_that_are_read_in_part_lack_clusters_until_they_are_found() -> None:
    layer = Layer("full+retrieval:recent=1:read=6:cluster=3", [24], new=2)
    layer.prompt(*draw(24, 1))
    shape = index_of(layer.store).shape
    assert shape is not None
    slots = LayerSlots(layer.store.contents, slots_of(layer.store).codes, shape)
    reader: Any = layer.policy.reader
    assert not reader.is_missing(index_held(layer), slots, 0)
    before = index_held(layer).directions.clone()
    index_held(layer).used.zero_()
    assert reader.is_missing(index_held(layer), slots, 0), "the layer was given slots"
    assert not reader.is_missing(index_held(layer), slots, 1), "looked for while the index is made"
    index_of(layer.store).complete()
    assert torch.equal(index_held(layer).directions, before) and not reader.is_missing(index_held(layer), slots, 0)


def test_new_tokens_join_clusters_until_these_are_found_again() -> None:
    layer = Layer("full+retrieval:recent=1:read=6:cluster=3:sinks=0:rebuild=5", [24], new=20)
    layer.prompt(*draw(24, 1))
    before = [t.clone() for t in index_held(layer)[:4]]
    for step in range(1, 11):
        now = draw(1, step)
        layer.step(*now)
        index = index_held(layer)
        joined = [belongs(now[1][0, h, 0].tolist(), index.directions[0, h][index.used[0, h]].tolist()) for h in (0, 1)]
        assert index.assigned[0, :, 23 + step, 0].tolist() == joined
        layer.between()
        same = all(map(torch.equal, index_held(layer)[:4], before))
        assert same == bool(step % 5)
        before = [t.clone() for t in index_held(layer)[:4]]


def test_a_layer_that_gets_more_slots_keeps_its_clusters() -> None:
    """Whether it becomes longer, or a row in it is read in part from now on."""
    layer = Layer("full+retrieval:recent=1:read=6:cluster=3", [24, 5], new=1)
    layer.prompt(*draw(24, 1, batch=2), torch.arange(24) >= torch.tensor([[0], [19]]))
    reader: Any = layer.policy.reader
    assert reader.has_clusters(index_held(layer)).tolist() == [True, False]
    old = index_held(layer)
    for step in range(3):
        layer.step(*draw(1, step, batch=2), valid=torch.tensor([[False], [True]]))
        layer.between()
    assert reader.has_clusters(index_held(layer)).tolist() == [True, True]
    assert index_held(layer) is old
    for step in range(3):
        layer.step(*draw(1, step, batch=2))
        layer.between()
    new = index_held(layer)
    first = old.used.shape[-1]
    assert new is not old and new.used.shape[-1] > first
    for now, then in zip(new[:4], old[:4], strict=True):
        assert torch.equal(now[:, :, :first], then) and not bool(now[:, :, first:].any())


def test_a_row_read_whole_has_no_clusters_until_it_is_read_in_part() -> None:
    """So that it has the same ones as it would have alone."""
    both = Layer("full+retrieval:recent=1:read=8:cluster=3", [24, 5], new=1)
    alone = Layer("full+retrieval:recent=1:read=8:cluster=3", [5], new=1)
    q, k, v = draw(24, 1, batch=2)
    both.prompt(q, k, v, torch.arange(24) >= torch.tensor([[0], [19]]))
    alone.prompt(*(t[1:, :, 19:] for t in (q, k, v)))
    for step in range(24):
        now = draw(1, 100 + step, batch=2)
        out = both.step(*now), alone.step(*(t[1:] for t in now))
        assert torch.allclose(out[0][1], out[1][0], atol=1e-5), step
        both.between()
        alone.between()


def test_what_is_read_to_assign_a_key_is_counted() -> None:
    plan = kvpolicy.plan("tiny", "full+retrieval:recent=1:read=16", prompt=500, dtype=torch.float32)
    layer = plan.layers[0]
    clusters = Retrieval().clusters(layer.tokens)
    heads = 4
    dim = 32
    centers = heads * clusters * (dim * 4 + 1)
    index = centers + heads * (clusters * (dim * 4 + 4) + layer.tokens * 2)
    assert layer.nbytes["index"] == index + 8
    assert layer.moved == index + centers + heads * layer.tokens * 4 + heads * dim * 4 * (2 * 16 + 1)


def test_a_rollback_brings_clusters_back() -> None:
    layer = Layer("full+retrieval:recent=1:read=6:cluster=3:rebuild=3", [24], new=20)
    layer.prompt(*draw(24, 1))
    layer.step(*draw(1, 2))
    layer.between()
    before = [t.clone() for t in index_held(layer)]
    layer.store.journal.mark(4)
    for step in range(4):
        layer.step(*draw(1, 10 + step))
        layer.between()
    assert not torch.equal(index_held(layer).directions, before[0])
    layer.store.journal.roll_back(0)
    live = layer.store.tensors.positions >= 0
    for now, then in zip(index_held(layer)[:4], before[:4], strict=True):
        assert torch.equal(now, then)
    assert torch.equal(index_held(layer).assigned[live], before[4][live])
    assert index_of(layer.store).shape is not None
