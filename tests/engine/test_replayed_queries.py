"""Which queries of a replay are kept, over chunks, tiles and padded rows, and their attention."""

from __future__ import annotations

import torch

from kvpolicy.engine.replay import chunks
from kvpolicy.engine.replayed_queries import ReplayedQueries, no_queries
from kvpolicy.statistics import Replay
from kvpolicy.statistics.windows import ScoreTransform


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


def test_attention_is_that_to_the_tokens_alone() -> None:
    torch.manual_seed(0)
    found = ReplayedQueries(torch.randn(2, 4, 3, 8), torch.tensor([[0, 4, 9], [0, 1, -1]]))
    keys = torch.randn(2, 2, 10, 8)
    there = torch.ones(2, 2, 10, dtype=torch.bool)
    there[1, :, 6:] = False
    counts = torch.rand(2, 2, 10)
    rows, none = found.attention(keys, there, counts, ScoreTransform(0.3))
    scores = 0.3 * found.queries @ keys.repeat_interleave(2, 1).mT + counts.repeat_interleave(2, 1)[:, :, None]
    want = scores.masked_fill(~there.repeat_interleave(2, 1)[:, :, None], -torch.inf).softmax(-1)
    want[1, :, 2] = 0
    torch.testing.assert_close(rows, want)
    assert none is None
    plain, _ = found.attention(keys, there, None, ScoreTransform(0.3))
    assert not torch.allclose(plain, want)
    learned = torch.tensor([0.0, -20.0, 1.0, 5.0])
    rows, sinks = found.attention(keys, there, None, ScoreTransform(0.3, sinks=learned))
    assert sinks is not None and sinks[1, :, 2].eq(0).all()
    total = plain.new_ones(2, 4, 3).masked_fill((found.tokens < 0)[:, None], 0)
    torch.testing.assert_close(rows.sum(-1) + sinks, total)
    score = 0.3 * found.queries @ keys.repeat_interleave(2, 1).mT
    small = (learned[1].double() - score.double()[0, 1].logsumexp(-1)).exp()
    torch.testing.assert_close(sinks[0, 1].double(), small, atol=0, rtol=1e-5)
