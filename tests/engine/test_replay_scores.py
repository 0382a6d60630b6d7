"""What each token of a chunk receives from a replay, against one query after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.engine.replay import Chunk, Gain, add_scores, chunks, received
from kvpolicy.engine.replayed_queries import ReplayedQueries, no_queries
from kvpolicy.statistics import Replay
from kvpolicy.statistics.replay import NOT_REPLAYED
from kvpolicy.statistics.windows import ScoreTransform
from tests.engine.parts import generator

ROWS = 3
HEADS = 2
GROUP = 2
DIM = 4
PROMPT = 12
REPLAYED = 37
CHUNK = Chunk(
    number=1,
    columns=torch.tensor([[4, 5, 6, 7], [5, 7, 8, 10], [3, 0, 9, 11]]),
    chosen=torch.tensor([[True] * 4, [True, True, False, False], [False] * 4]),
    overlap=torch.zeros(ROWS, 0, dtype=torch.int64),
    sinks=torch.tensor([[0, 1], [2, 3], [1, 2]]),
)
"""The last row has no such chunk."""


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def slow(q: Tensor, k: Tensor, keys: Tensor, valid: Tensor, gain: Gain | None) -> Tensor:
    """The largest weight of each column of the chunk over all queries of a KV head."""
    found = torch.full((ROWS, HEADS, 4), NOT_REPLAYED, dtype=torch.float64)
    for b, hq, i in valid[:, None].expand(-1, HEADS * GROUP, -1).nonzero().tolist():
        h = hq // GROUP
        places = CHUNK.chosen[b].nonzero()[:, 0].tolist()
        sinks = keys[b, h, CHUNK.sinks[b]] if places else keys[b, h, :0]
        own = k[b, h, : i + 1][valid[b, : i + 1]]
        seen = torch.cat([sinks, keys[b, h, CHUNK.columns[b, places]], own]).double()
        weights = (seen @ q[b, hq, i].double() * 0.5).softmax(0)[len(sinks) :]
        for place, weight in zip(places, weights, strict=False):
            factor = 1.0
            if gain is not None:
                factor = float(gain.outputs[b, hq, CHUNK.columns[b, place]] / gain.inputs[b, i])
            found[b, h, place] = max(float(found[b, h, place]), float(weight) * factor)
    return found


@pytest.mark.parametrize("tile", [1, 1 << 20], ids=["tiles of 16 queries", "one tile"])
@pytest.mark.parametrize("with_gain", [False, True])
def test_the_largest_weight_counts(with_gain: bool, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy.engine.replay.TILE_ELEMENTS", tile)
    q = drawn(0, ROWS, HEADS * GROUP, REPLAYED, DIM)
    k = drawn(1, ROWS, HEADS, REPLAYED, DIM)
    keys = drawn(2, ROWS, HEADS, PROMPT, DIM)
    valid = torch.rand(ROWS, REPLAYED, generator=generator(3)) < 0.8
    gain = None
    if with_gain:
        gain = Gain(drawn(4, ROWS, HEADS * GROUP, PROMPT).abs(), 0.1 + drawn(5, ROWS, REPLAYED).abs())
    got = received(q, k, keys, ScoreTransform(0.5), CHUNK, valid, gain)
    torch.testing.assert_close(got.double(), slow(q, k, keys, valid, gain), atol=1e-6, rtol=1e-5)


def test_columns_that_a_row_does_not_have_keep_their_scores() -> None:
    scores = torch.full((ROWS, HEADS, PROMPT), 0.25)
    new = torch.arange(1.0, 5).expand(ROWS, HEADS, 4).masked_fill(~CHUNK.chosen[:, None], NOT_REPLAYED)
    add_scores(scores, CHUNK, new)
    for row, written in enumerate([{4: 1.0, 5: 2.0, 6: 3.0, 7: 4.0}, {5: 1.0, 7: 2.0}, {}]):
        want = [written.get(column, 0.25) for column in range(PROMPT)]
        assert scores[row].tolist() == [want] * HEADS


def observed(context: torch.Tensor, width: int, chunk: int, tile: int, before: int = 2) -> ReplayedQueries:
    """Queries that are the number of their token, fed in tiles of texts with `before` tokens ahead of the chunk."""
    rows = context.shape[0]
    found = no_queries(torch.zeros(rows, 2, 1, 3), context, width)
    for part in chunks(context, Replay(chunk)):
        columns = before + part.columns.shape[1]
        numbers = torch.arange(columns) - before + part.number * chunk
        q = numbers.float()[None, None, :, None].expand(rows, 2, -1, 3)
        for start in range(0, columns, tile):
            found.add(q[:, :, start : start + tile], start, part, chunk, columns)
    return found


def test_queries_are_spread_over_each_row() -> None:
    context = torch.zeros(4, 40, dtype=torch.bool)
    for row, count in enumerate((40, 13, 3, 0)):
        context[row, 40 - count :] = True
    for chunk, tile in ((64, 64), (7, 64), (7, 3), (40, 1)):
        found = observed(context, 4, chunk, tile)
        assert found.tokens.tolist() == [[5, 15, 25, 35], [1, 4, 8, 11], [0, 1, 2, -1], [-1] * 4]
        want = found.tokens.clamp_min(0).float()[:, None, :, None].expand(-1, 2, -1, 3)
        assert torch.equal(found.queries, want)


def test_no_more_queries_than_tokens() -> None:
    """A window may be any number; memory of as many queries may not."""
    context = torch.ones(2, 5, dtype=torch.bool)
    assert no_queries(torch.zeros(2, 2, 1, 3), context, 10**12).tokens.tolist() == [[0, 1, 2, 3, 4]] * 2
