"""Clusters of keys: how they are found and weighed, when, and that they are counted, carried over and brought back."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import Retrieval
from kvpolicy.engine.layer_slots import LayerSlots
from kvpolicy.engine.reading import ReadShape, choose, need_of
from kvpolicy.protocols import SINGLE_RANK
from kvpolicy.readers import retrieval
from kvpolicy.readers.clusters import ClusterTokens, need_in_clusters
from kvpolicy.readers.retrieval import k_means, mean_by_cluster, nearest
from tests.engine.parts import index_of, slots_of
from tests.readers.bench import DIM, Layer, draw
from tests.reference.readers.retrieval import belongs
from tests.reference.readers.retrieval import k_means as slow_k_means


def index_held(layer: Layer) -> Any:
    """The index of a layer."""
    reads: Any = layer.store.tensors.reads
    return reads.index


@pytest.mark.parametrize("tokens", [(1, 7), (40, 12), (0, 3)])
def test_k_means_is_that_of_the_slow_version(tokens: tuple[int, int]) -> None:
    """Of each head alone, whatever stands behind its tokens."""
    generator = torch.Generator().manual_seed(sum(tokens))
    keys = torch.randn(1, 2, 40, DIM, generator=generator)
    held = torch.tensor([tokens])
    keys = keys.masked_fill(torch.arange(40)[:, None] >= held[..., None, None], torch.nan)
    counts = (held + 2) // 3
    directions, used = k_means(keys, held, counts, 14)
    for head in range(2):
        count = int(counts[0, head])
        assert used[0, head].tolist() == [True] * count + [False] * (14 - count)
        if not count:
            continue
        want = slow_k_means(keys[0, head, : tokens[head]].double().tolist(), count)
        assert torch.allclose(directions[0, head, :count].double(), torch.tensor(want, dtype=torch.float64), atol=1e-5)


def test_a_cluster_that_loses_its_keys_stays() -> None:
    """Of equal directions, the first one gets all keys."""
    keys = torch.tensor([3.0, 4.0]).expand(1, 1, 6, 2)
    directions, used = k_means(keys, torch.tensor([[6]]), torch.tensor([[3]]), 3)
    assert torch.allclose(directions, torch.tensor([0.6, 0.8]).expand(1, 1, 3, 2)) and bool(used.all())


def test_equal_directions_and_empty_heads() -> None:
    """Of equal products, the first direction is taken, however many keys are looked at; without one, cluster 0."""
    keys = torch.randn(1, 2, 50, DIM, generator=torch.Generator().manual_seed(1))
    directions = keys[:, :, :1].expand(-1, -1, 6, -1)
    used = torch.tensor([[[False, True, True, True, True, True], [False] * 6]])
    every = nearest(keys, directions, used)
    assert every.tolist() == [[[1] * 50, [0] * 50]]
    for number in range(50):
        assert torch.equal(nearest(keys[:, :, number : number + 1], directions, used), every[:, :, :1])


def test_products_are_looked_at_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    keys, directions = (torch.randn(2, 2, n, DIM, generator=generator) for n in (33, 5))
    used = torch.rand(2, 2, 5, generator=generator) < 0.7
    whole = nearest(keys, directions, used)
    monkeypatch.setattr(retrieval, "_TILE", 40)
    assert torch.equal(nearest(keys, directions, used), whole)
    for row, head, key in ((0, 0, 3), (1, 1, 32)):
        there = [d if u else [0.0] * DIM for d, u in zip(directions[row, head].tolist(), used[row, head], strict=True)]
        want = belongs(keys[row, head, key].tolist(), [d for d, u in zip(there, used[row, head], strict=True) if u])
        assert int(used[row, head].nonzero()[want]) == int(whole[row, head, key])


def test_means_leave_out_what_does_not_count() -> None:
    vectors = torch.tensor([[[[1.0], [3.0], [torch.nan], [8.0], [5.0]]]])
    counted = torch.tensor([[[True, True, False, True, False]]])
    means, number = mean_by_cluster(vectors, torch.tensor([[[2, 2, 0, 0, 0]]]), counted, 3)
    assert means.flatten().tolist() == [8, 0, 2] and number.flatten().tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("cluster", "long", "tokens"),
    [*(("auto", 6, tokens) for tokens in (1, 5, 6, 9, 16, 17, 40)), (2, 6, 5), (2, 6, 40), ("auto", 100, 17)],
)
def test_long_prompts_are_clustered_in_segments(
    cluster: Any, long: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each segment as if it were alone; and the index has room for all clusters that any shorter row may need."""
    monkeypatch.setattr(retrieval, "SEGMENT", 8)
    monkeypatch.setattr(retrieval, "LONG", long)
    monkeypatch.setattr("kvpolicy.readers.common.LONG", long)
    reader = Retrieval(cluster=cluster, sinks=1)
    index = reader.alloc(1, 1, 44, DIM, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(tokens)
    keys = torch.randn(1, 1, 44, DIM, generator=generator)
    order = torch.randperm(44, generator=generator)
    positions = torch.where(order < tokens, order, -1).int()[None, None]
    reader.fit_clusters(index, keys, keys, positions, torch.ones(1, dtype=torch.bool))
    size = cluster if cluster != "auto" else 4 if tokens - 1 < long else 16
    by_position = [int(order.argsort()[position]) for position in range(1, tokens)]
    want: list[Any] = []
    for start in range(0, tokens - 1, 8):
        segment = by_position[start : start + 8]
        want += slow_k_means(keys[0, 0, segment].double().tolist(), -(-len(segment) // size))
    found = index.directions[index.used]
    assert torch.allclose(found.double(), torch.tensor(want, dtype=torch.float64).view(-1, DIM), atol=1e-5)
    assert reader.has_clusters(index).tolist() == [tokens > 1]


def test_rows_that_are_not_asked_for_keep_their_clusters() -> None:
    reader = Retrieval(cluster=2, sinks=0)
    index: Any = reader.alloc(2, 1, 8, DIM, torch.float32, "cpu")
    keys = torch.randn(2, 1, 8, DIM, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(8).expand(2, 1, -1).int()
    reader.fit_clusters(index, keys, keys, positions, torch.tensor([True, False]))
    assert reader.has_clusters(index).tolist() == [True, False]
    assert not bool(index.directions[1].any() or index.values[1].any() or index.lengths[1].any())
    before = [t[0].clone() for t in index]
    reader.fit_clusters(index, -keys, keys, positions, torch.tensor([False, True]))
    assert all(torch.equal(now[0], then) for now, then in zip(index, before, strict=True))


def test_an_index_has_room_for_the_clusters_of_shorter_rows() -> None:
    """Which have clusters of 4 tokens, and so more of them."""
    assert [Retrieval().clusters(slots) for slots in (1, 4095, 4096, 16_400)] == [1, 1024, 1024, 1025]
    assert [Retrieval(cluster=16).clusters(slots) for slots in (0, 4096, 8193)] == [0, 256, 513]


def test_the_number_of_a_cluster_has_two_bytes_where_that_is_enough() -> None:
    for entries, kind in ((4 * 8000, torch.int16), (70_000, torch.int32)):
        assert Retrieval(cluster=2).alloc(1, 1, entries, 2, torch.float32, "meta").assigned.dtype == kind


def test_layers_that_follow_read_what_clusters_chose() -> None:
    model, tokenizer = kvpolicy.tiny()
    ids = tokenizer("tiger=4821\nfalcon=1937\n" * 12 + "?tiger=", return_tensors="pt")
    with kvpolicy.attach(model, "full+reuse:every=2/retrieval:recent=1:read=24:estimate=false") as handle:
        model.generate(**ids, max_new_tokens=3)
        report = handle.report()
        plan = handle.plan
        assert plan is not None and (report.nbytes, report.moved) == (plan.nbytes, plan.moved)
        kinds = [layer.nbytes.get("index", 0) for layer in report.layers]
    assert [kind > 20_000 for kind in kinds] == [False, False, True, False, True, False, True, False]


def test_a_cluster_weighs_as_many_tokens_as_it_holds() -> None:
    """Also those that a merged slot stands for; and what is read of it is not estimated."""
    assigned = torch.tensor([[[0, 1, 1, 0, 2]]])
    log_tokens = torch.tensor([[[1.0, 1.0, 3.0, 1.0, 0.0]]]).log()
    clusters = ClusterTokens.counted(assigned, log_tokens, 4)
    assert torch.allclose(clusters.total, torch.tensor([[[2.0, 4.0, 0.0, 0.0]]]))
    left = clusters.unread(torch.tensor([[[2, 0, 3]]]), torch.tensor([[[True, True, False]]]))
    assert torch.allclose(left, torch.tensor([[[1.0, 1.0, 0.0, 0.0]]]))
    score = torch.tensor([[[[0.0, 1.0, 9.0, 9.0], [2.0, 0.0, 9.0, 9.0]]]])
    need = need_in_clusters(score, clusters, SINGLE_RANK)[0, 0].exp()
    weights = torch.tensor([[1.0, 2.718281828], [7.389056099, 1.0]])
    weights = (weights / (weights * torch.tensor([2.0, 4.0])).sum(-1, keepdim=True)).amax(0)
    assert torch.allclose(need, weights[[0, 1, 1, 0, 0]] * torch.tensor([1.0, 1, 3, 1, 0]), atol=1e-6)
    nothing = ClusterTokens.counted(assigned, torch.full((1, 1, 5), -torch.inf), 4)
    assert bool(need_in_clusters(score, nothing, SINGLE_RANK).isfinite().all())


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


def test_tokens_at_the_first_positions_are_always_read() -> None:
    """Behind the newest and the first kept token, as far as they fit."""
    positions = torch.tensor([[[5, 4, 3, 2, 1, 0]]], dtype=torch.int32)
    score = torch.tensor([[[[0.0, 9.0, 8.0, 7.0, 6.0, 5.0]]]])
    for count, want in ((2, {0, 5}), (3, {0, 1, 5}), (4, {0, 1, 2, 5}), (5, {0, 1, 2, 4, 5})):
        shape = ReadShape(1, count, ((0, 6),))
        needs = partial(need_of, score, ranks=SINGLE_RANK)
        found = choose(shape, torch.tensor([9]), needs, positions, torch.tensor([6]), 1, sinks=3)
        assert {int(positions[0, 0, slot]) for slot in found.slots[0, 0]} == want
