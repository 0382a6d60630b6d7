"""Clusters of keys: how they are found, kept up to date, counted and carried over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import KVPolicyError, Policy, Retrieval
from kvpolicy.readers import retrieval
from kvpolicy.readers.retrieval import k_means, mean_by_cluster, nearest
from tests.readers.bench import DIM, GROUP, HEADS, Layer, draw
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


@pytest.mark.parametrize("base", ["full", "snapkv"])
def test_clusters_of_single_tokens_read_as_exact(base: str) -> None:
    """If they are found again after each step: a center is the key then."""
    at = "@0.5" if base == "snapkv" else ""
    budget = [13] if at else [26]
    spec = "retrieval:recent=1:cluster=1:estimate=false:sinks=0:rebuild=1"
    one, exact = (Layer(f"{base}+{reader}:read=6{at}", budget, new=9) for reader in (spec, "exact"))
    for layer in (one, exact):
        layer.prompt(*draw(26, 8))
    for step in range(9):
        q, k, v = draw(1, 60 + step)
        # Alike in a group: what the newest token weighs, which has no center yet, then changes no order.
        q = q[:, ::GROUP].repeat_interleave(GROUP, 1)
        outputs = [layer.step(q, k, v) for layer in (one, exact)]
        assert torch.allclose(outputs[0], outputs[1], atol=1e-6)
        for head in range(HEADS):
            assert one.positions_read(0, head) == exact.positions_read(0, head)
        for layer in (one, exact):
            layer.between()


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


@pytest.mark.parametrize(
    "spec", ["retrieval:cluster=0", "retrieval:sinks=-1", "retrieval:rebuild=0", "retrieval:read=0"]
)
def test_numbers_out_of_range_are_refused(spec: str) -> None:
    with pytest.raises(KVPolicyError, match=r"Retrieval\.[a-z]+ must be"):
        Policy.parse(f"full+{spec}")


def test_layers_that_follow_read_what_clusters_chose() -> None:
    with pytest.raises(KVPolicyError, match="without estimates of unread tokens"):
        Policy.parse("full+reuse/retrieval")
    model, tokenizer = kvpolicy.tiny()
    ids = tokenizer("tiger=4821\nfalcon=1937\n" * 12 + "?tiger=", return_tensors="pt")
    with kvpolicy.attach(model, "full+reuse:every=2/retrieval:recent=1:read=24:estimate=false") as handle:
        model.generate(**ids, max_new_tokens=3)
        report = handle.report()
        plan = handle.plan
        assert plan is not None and (report.nbytes, report.moved) == (plan.nbytes, plan.moved)
        kinds = [layer.nbytes.get("index", 0) for layer in report.layers]
    assert [kind > 20_000 for kind in kinds] == [False, False, True, False, True, False, True, False]
