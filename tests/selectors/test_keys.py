"""Selectors of keys and values: KeyDiff, those that score a token once, and R-KV."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.protocols import HeadShape, View
from kvpolicy.selectors import rkv
from kvpolicy.selectors.cur import CUR
from kvpolicy.selectors.keydiff import KeyDiff
from kvpolicy.selectors.lagkv import LagKV
from kvpolicy.selectors.once import OnceScored, none_scored
from kvpolicy.selectors.rkv import mean_cosines
from kvpolicy.statistics import Candidates, Results, Vectors
from tests.conformance.bench import Bench, draw, padding

VECTOR = [[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.0, 0.9]]
"""The keys of the worked example."""


def scored(keys: Tensor, positions: Tensor | None = None) -> Any:
    batch, heads, count, dim = keys.shape
    where = torch.arange(count, dtype=torch.int32).expand(batch, heads, -1) if positions is None else positions
    view = View(where, torch.full((batch,), count), torch.full((batch,), 2), 0)
    state = KeyDiff().alloc(batch, heads, count, "cpu", HeadShape(1, dim))
    return KeyDiff().observe(state, Results({Vectors: Candidates(keys, keys, 1.0)}), view)


def test_the_vector() -> None:
    got = scored(torch.tensor(VECTOR)[None, None])
    assert got.score[0, 0].tolist() == pytest.approx([-0.686751, -0.762822, -0.726893, -0.726893], abs=1e-6)


def test_a_key_of_zeros_is_at_right_angles_to_all() -> None:
    keys = torch.tensor([*VECTOR, [0.0, 0.0]])[None, None]
    got = scored(keys)
    assert got.score[0, 0, -1] == 0 and torch.equal(got.anchor, scored(keys[:, :, :-1]).anchor)
    assert scored(torch.zeros(1, 1, 3, 2)).score.abs().tolist() == [[[0.0, 0.0, 0.0]]]


@pytest.mark.parametrize("others", [[], [[0.0] * 8], [[torch.nan] * 8, [torch.inf] * 8]])
def test_two_keys_are_equally_far_from_their_mean(others: list[list[float]]) -> None:
    """To the last bit, so that the earlier one stays, whatever the order of sums; keys of zeros do not count."""
    pair = torch.randn(50, 4, 2, 8, generator=torch.Generator().manual_seed(0))
    pair[0, 0, 1] = -pair[0, 0, 0]
    keys = torch.cat([torch.tensor(others).reshape(-1, 8).expand(50, 4, -1, -1), pair], 2)
    places = torch.tensor([[0, 1], [0, 1, 2], [-1, -1, 0, 1]][len(others)], dtype=torch.int32)
    got = scored(keys, places.expand(50, 4, -1)).score[..., -2:]
    assert torch.equal(got[..., 0], got[..., 1])
    cosine = torch.cosine_similarity(pair[1:, :, 0].double(), pair[1:, :, 1].double(), dim=-1)
    torch.testing.assert_close(got[1:, :, 0].double(), -((1 + cosine) / 2).sqrt(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("every", [1, 3])
def test_the_anchor_is_that_of_the_kept_tokens(every: int) -> None:
    """It is summed again after so many steps, so that nothing drifts however long the run."""
    bench = Bench(f"keydiff:every={every}", [12, 9])
    bench.forward(*draw(20, 0, batch=2), padding(20, 20, 13))
    for number in range(30 * every):
        bench.forward(*draw(1, number + 1, batch=2))
    store = bench.layer
    units = torch.nn.functional.normalize(store.tensors.keys, dim=-1) * (store.tensors.positions >= 0)[..., None]
    torch.testing.assert_close(store.tensors.state.anchor, units.sum(2))
    bench.check()


def scored_once(selector: LagKV | CUR, keys: Tensor, values: Tensor, budget: int) -> OnceScored:
    count = keys.shape[2]
    positions = torch.arange(count, dtype=torch.int32).expand(*keys.shape[:2], -1)
    view = View(positions, torch.tensor([count]), torch.tensor([budget]), 0)
    got = selector.observe(
        none_scored(1, keys.shape[1], count, "cpu"), Results({Vectors: Candidates(keys, values, 1.0)}), view
    )
    assert isinstance(got, OnceScored)
    return got


@pytest.mark.parametrize("of", ["product", "keys", "values", "mean"])
def test_a_window_of_zeros(of: str) -> None:
    got = scored_once(CUR(sinks=0, window=4, of=of), torch.zeros(1, 1, 8, 2), torch.zeros(1, 1, 8, 2), 4)  # pyright: ignore
    assert got.scored.all() and not got.score.any()


def test_a_token_alone_in_its_window_is_below_those_without_a_score() -> None:
    got = scored_once(CUR(sinks=0, window=1), torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2), 2)
    assert float(got.score.min()) > 0.999 and float(got.score.max()) < 1


def test_constant_channels_of_the_next_lag_count_as_nothing() -> None:
    keys = torch.randn(1, 1, 12, 4, generator=torch.Generator().manual_seed(0))
    keys[:, :, 4:8] = 1.0
    got = scored_once(LagKV(sinks=0, lag=4), keys, torch.ones(1, 1, 12, 4), 16)
    # The first lag has no range to compare with: its tokens are ranked by position, the earlier one higher.
    assert got.score[0, 0, :4].tolist() == [0.75, 0.5, 0.25, 0.0]
    assert got.scored[0, 0].tolist() == [True] * 8 + [False] * 4 and got.score.isfinite().all()


def test_numbers_of_invalid_tokens_are_ignored() -> None:
    for spec in ("lagkv:sinks=1:lag=2", "cur:sinks=1:window=3", "knorm", "keydiff"):
        bench = Bench(spec, [8, 6])
        q, k, v = draw(20, 3, batch=2)
        mask = padding(20, 20, 11)
        k[1, :, :9] = torch.inf
        v[1, :, :9] = torch.nan
        bench.forward(q, k, v, mask)
        assert bench.check().turns == 2


def test_the_latest_of_repeated_tokens_is_kept() -> None:
    """Eight directions, each of them five times, of which only the last fits."""
    bench = Bench("rkv:mix=0.0:window=1", [9], new=1)
    q, k, v = draw(41, 0)
    directions = torch.eye(8, k.shape[-1]).repeat(5, 1)
    k = torch.cat([directions, torch.full_like(directions[:1], 0.1)]).expand_as(k)
    bench.forward(q, k, v, None)
    kept = bench.layer.tensors.positions.sort(-1).values
    assert kept[0, 0].tolist() == [*range(32, 41)]


@pytest.mark.parametrize("tile", [1, 1 << 20])
def test_mean_cosines_in_tiles(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rkv, "TILE_ELEMENTS", tile)
    keys = torch.randn(2, 3, 40, 4, generator=torch.Generator().manual_seed(0))
    valid = torch.ones(2, 3, 40, dtype=torch.bool)
    valid[1, :, :11] = False
    found = mean_cosines(keys.masked_fill(~valid[..., None], torch.nan), valid, 0.5)
    for b, h in ((0, 0), (1, 2)):
        some = keys[b, h, valid[b, h]].double()
        some = some / some.norm(dim=-1, keepdim=True)
        cosine = (some @ some.T).fill_diagonal_(0)
        for row in cosine:
            alike = (row > 0.5).nonzero()
            if len(alike):
                row[alike[-1]] = 0
        torch.testing.assert_close(found[b, h, valid[b, h]].double(), cosine.mean(0), atol=1e-6, rtol=1e-5)
    assert not found[~valid].any()


def test_chunks_keep_the_newest_queries() -> None:
    q, k, v = draw(40, 0, batch=2)
    mask = padding(40, 40, 22)
    found: list[Any] = []
    for cuts in ([40], [25, 15], [38, 2], [36, 1, 1, 1, 1]):
        bench = Bench("rkv", [60, 60])
        start = 0
        for size in cuts:
            at = slice(start, start + size)
            bench.forward(q[:, :, at], k[:, :, at], v[:, :, at], mask[:, at])
            start += size
        state: Any = bench.layer.tensors.state
        found.append(state.queries)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
