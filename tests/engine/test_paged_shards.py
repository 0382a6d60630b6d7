"""Heads of several ranks, each shard beside the whole layer: a rank keeps what the layer would keep of its heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy import Policy
from kvpolicy.allocators.even import Even
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.pages import row_pages
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.protocols import SINGLE_RANK, Ranks
from kvpolicy.statistics.windows import ScoreTransform
from tests.engine.parts import generator
from tests.sampling import product

HEADS = 4
GROUP = 2
DIM = 4
SCALE = ScoreTransform(0.5)
SHARDS = [
    [Ranks(rank=rank, size=2, queries=(4, 4), heads=(2, 2)) for rank in range(2)],
    [Ranks(rank=rank, size=3, queries=(2, 4, 2), heads=(1, 2, 1)) for rank in range(3)],
    # Each KV head on two ranks, and one query head on each.
    [Ranks(rank=rank, size=8, replicas=2, queries=(1,) * 8, heads=(1,) * 8) for rank in range(8)],
]


class Layer(NamedTuple):
    """A store, and the heads that it has."""

    store: LayerStore
    kv: slice
    queries: slice


def draw(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    dice = generator(seed)
    q, k, v = (torch.randn(2, heads, count, DIM, generator=dice) for heads in (HEADS * GROUP, HEADS, HEADS))
    return q, k, v


def layers(text: str, shards: list[Ranks]) -> list[Layer]:
    """The whole layer, then its shards, without tokens."""
    policy = Policy.parse(text)
    made: list[Layer] = []
    for ranks in [SINGLE_RANK, *shards]:
        store = LayerStore(LayerSpec(0, policy.selector, policy.codec, policy.decode, heads=Even()))
        queries = slice(sum(ranks.queries[: ranks.rank]), sum(ranks.queries[: ranks.rank + 1]) or None)
        made.append(Layer(store, ranks.held, queries))
        _, k, _ = draw(1, 0)
        own = k[:, ranks.held]
        store.initialize(own, ranks, (ranks.queries[ranks.rank] // own.shape[1]) if ranks.queries else GROUP)
    return made


def same(every: list[Layer]) -> None:
    whole = every[0].store.geometry.head_positions()
    for store, kv, _ in every[1:]:
        want = [[sorted(p for p in head if p >= 0) for head in row] for row in whole[:, kv].tolist()]
        assert [
            [sorted(p for p in head if p >= 0) for head in row] for row in store.geometry.head_positions().tolist()
        ] == want


@product(
    "last,policy,shards", [6, 99], ["window", "window+tokenwise:group_size=2:residual_length=2:block_size=3"], SHARDS
)
def test_a_shard_keeps_what_the_layer_keeps_of_its_heads(last: int, policy: str, shards: list[Ranks]) -> None:
    """Pages that cannot be divided evenly go to the first heads of the layer, also where they are added in steps."""
    every = layers(policy, shards)
    keep = torch.tensor([9, 11])
    extra = torch.zeros(2, dtype=torch.int64)
    most = torch.tensor([last, last])
    assert (row_pages(keep, extra, keep + 1, HEADS).body % HEADS).any(), "some heads have a page more than others"
    q, k, v = draw(5, 1)
    for store, kv, queries in every:
        _, pending = store.attend_prompt(q[:, queries], k[:, kv], v[:, kv], None, SCALE)
        store.compress(pending, RowBudget(keep, extra, torch.minimum(keep, most), most))
        store.ensure_capacity()
    same(every)
    for step in range(12):
        q, k, v = draw(1, 10 + step)
        outs: list[Tensor] = []
        for store, kv, queries in every:
            outs.append(store.append(q[:, queries], k[:, kv], v[:, kv], None, SCALE))
            store.count_step()
            store.ensure_capacity()
        same(every)
        for out, (_, _, queries) in zip(outs, every, strict=True):
            torch.testing.assert_close(out, outs[0][:, queries], atol=1e-5, rtol=1e-4)
