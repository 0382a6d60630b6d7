"""R-KV: attention of the newest queries less redundancy, ranked again now and then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy import KVPolicyError, Policy
from kvpolicy.selectors import rkv
from kvpolicy.selectors.rkv import mean_cosines
from tests.conformance.bench import Bench, draw, padding


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


def test_a_window_that_no_memory_holds() -> None:
    """Its queries are held for each head, whatever the budget is."""
    with pytest.raises(KVPolicyError, match=r"window must be between 1 and 32767, got 1000000000; try 8\."):
        Policy.parse("rkv:window=1000000000@0.5")
