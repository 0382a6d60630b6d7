"""The arithmetic of ranks, on one process; what they ask each other is tested in tests/parallel."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kvpolicy.parallel.runtime import share, sharing_of
from kvpolicy.parallel.sharding import Heads, aligned, even
from kvpolicy.statistics import ranks as ranks_module
from kvpolicy.statistics.ranks import SINGLE_RANK, Ranks


def _ranks(rank: int, queries: tuple[int, ...], heads: tuple[int, ...], replicas: int = 1) -> Ranks:
    return Ranks(rank=rank, size=len(heads), group="none", replicas=replicas, queries=queries, heads=heads)


def test_a_mean_does_not_depend_on_the_order_of_heads() -> None:
    x = torch.rand(1, 64, 300) * 10.0 ** torch.randint(-6, 1, (1, 64, 1))
    assert torch.equal(SINGLE_RANK.head_mean(x), SINGLE_RANK.head_mean(x.flip(1)))
    assert not torch.equal(x.mean(1), x.flip(1).mean(1))


def test_uneven_heads_stand_behind_each_other() -> None:
    ranks = [_ranks(rank, (4, 2), (2, 1)) for rank in range(2)]
    assert [some.held for some in ranks] == [slice(0, 2), slice(2, 3)]
    assert [some.mine(torch.arange(6)).tolist() for some in ranks] == [[0, 1, 2, 3], [4, 5]]
    assert [some.query_heads(own) for some, own in zip(ranks, (4, 2), strict=True)] == [6, 6]
    assert ranks[1].most_heads(1) == 2


def test_layers_that_read_the_same_keys_stand_together() -> None:
    """By KV head, as queries do: of three layers, a rank has three times its heads."""
    ranks = [_ranks(rank, (4, 2), (2, 1)) for rank in range(2)]
    assert [some.query_heads(own) for some, own in zip(ranks, (12, 6), strict=True)] == [18, 18]
    assert [some.mine(torch.arange(18)).tolist() for some in ranks] == [[*range(12)], [*range(12, 18)]]


def test_twins_hold_the_same_head_and_other_queries() -> None:
    ranks = [_ranks(rank, (2, 2, 2, 2), (1, 1, 1, 1), replicas=2) for rank in range(4)]
    assert [some.held for some in ranks] == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]
    assert [some.mine(torch.arange(8)).tolist() for some in ranks] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_rank_without_heads_has_a_phantom_one() -> None:
    last = _ranks(3, (2, 2, 2, 0), (1, 1, 1, 0))
    assert last.phantom and last.held == slice(0, 1) and last.mine(torch.arange(6)).shape == (1,)
    assert not _ranks(2, (2, 2, 2, 0), (1, 1, 1, 0)).phantom and last.query_heads(1) == 6


def test_the_mean_of_a_replicated_head_is_over_all_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    every = torch.rand(2, 1, 4, 5)
    halves = every.split(2, 2)
    sums = torch.stack([part.double().sum(2) for part in halves])
    monkeypatch.setattr(ranks_module, "gather", lambda x, size, group: sums)
    twin = Ranks(rank=0, size=2, group="none", replicas=2, twins="none", queries=(2, 2), heads=(1, 1))
    assert torch.equal(twin.group_mean(halves[0]), every.double().mean(2).float())


def test_a_whole_model_is_not_shared() -> None:
    assert sharing_of(torch.nn.Linear(2, 2)) is None


class Sharded(torch.nn.Linear):
    """A module with the attributes of a model that transformers sharded."""

    _tp_size = 2

    def __init__(self, mesh: Any) -> None:
        super().__init__(2, 2)
        self._device_mesh = mesh


@pytest.mark.parametrize("dims", [1, 2])
def test_of_a_mesh_of_several_dimensions_one_divides_heads(dims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", {"data": 3, "tp": 2, "only": 2}.__getitem__)
    mesh = SimpleNamespace(ndim=dims, get_group=lambda name="only" if dims == 1 else None: name)
    sharing = sharing_of(Sharded(mesh))
    assert sharing is not None and sharing.group == ("only" if dims == 1 else "tp") and sharing.size == 2


@pytest.mark.parametrize("rank", range(4, 8))
def test_twins_are_processes_of_the_group(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group need not begin with the first process of the job."""
    made: list[list[int]] = []

    def new_group(members: list[int]) -> Any:
        made.append(members)
        return SimpleNamespace(group_name=str(members))

    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 5, 6, 7])
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(dist, "get_rank", lambda *group: rank - 4 if group else rank)
    monkeypatch.setattr(dist, "new_group", new_group)
    model = torch.nn.Linear(2, 2)
    share(model, "some", replicas=2)
    sharing = sharing_of(model)
    assert made == [[4, 5], [6, 7]]
    assert sharing is not None and sharing.twins == ("[4, 5]" if rank < 6 else "[6, 7]") and sharing.replicas == 2


SIZES = [*product((1, 2, 3, 4, 8), (1, 2, 3, 7), (1, 2, 3, 4, 8))]


def test_every_query_head_is_beside_its_key() -> None:
    for keys, group, size in SIZES:
        shards = [Heads.shard(keys * group, keys, 4, rank=rank, size=size) for rank in range(size)]
        assert [head for shard in shards for head in shard.queries] == [*range(keys * group)]
        for shard in shards:
            assert all(head // group in shard.keys for head in shard.queries)
        each = [head for shard in shards for head in shard.keys]
        assert sorted(each) == sorted([*range(keys)] * shards[0].replicas)
        if shards[0].replicas > 1:  # which twins must agree on, so that each has as many queries
            assert len({len(shard.queries) for shard in shards}) == 1


def test_rows_are_divided_without_gaps() -> None:
    for total, size in product((1, 4, 8, 12, 24, 32, 60, 100), (1, 2, 3, 4, 8)):
        for divide in (even, aligned):
            assert [row for rank in range(size) for row in divide(total, rank, size)] == [*range(total)]
    assert [aligned(24, rank, 2) for rank in range(2)] == [range(0, 16), range(16, 24)]
    assert [aligned(12, rank, 2) for rank in range(2)] == [range(0, 8), range(8, 12)]
