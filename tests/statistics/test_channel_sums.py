"""Sums and largest values of channels, from tiles and chunks as from one piece."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kvpolicy.protocols import SINGLE_RANK
from kvpolicy.statistics.channel_sums import ChannelSums, LargestQueries, QuerySquares, absolute_sums, largest_queries
from kvpolicy.statistics.statistic import Coming, Tile
from kvpolicy.statistics.windows import ScoreTransform
from tests.engine.parts import candidates_of, generator

CHUNKED = [[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1]]
VALID = torch.tensor(CHUNKED).bool()
Q, K = (torch.randn(3, heads, 7, 8, generator=generator(heads)) for heads in (4, 2))


def tile(start: int, stop: int) -> Tile:
    at = slice(start, stop)
    return Tile(Q[:, :, at], K[:, :, at], start, VALID[:, at], (start, stop) == (0, 7))


@pytest.mark.parametrize("pieces", [[0, 7], [0, 3, 7], [0, 1, 2, 7]])
@pytest.mark.parametrize("joined", [False, True])
def test_pieces_are_those_of_the_whole(pieces: list[int], joined: bool) -> None:
    coming = Coming(VALID, 7, torch.zeros(3, dtype=torch.int64), None)
    largest = LargestQueries().begun(coming)
    sums = ChannelSums().begun(coming)
    for start, stop in pairwise(pieces):
        one = tile(start, stop)
        if joined:
            largest = largest.joined(LargestQueries().begun(coming).added(one), start)
            sums = sums.joined(ChannelSums().begun(coming).added(one), start)
        else:
            largest = largest.added(one)
            sums = sums.added(one)
    assert largest.absmax is not None and sums.sums is not None
    assert torch.equal(largest.absmax, largest_queries(Q, 2, VALID))
    for found, expected in zip(sums.sums, absolute_sums(Q, K, VALID), strict=True):
        assert torch.allclose(found, expected)
    candidates = candidates_of(K, VALID, ScoreTransform(1.0))
    assert not largest.reduced(candidates) and not sums.reduced(candidates), "selectors see neither"


def test_rows_follow() -> None:
    largest = LargestQueries().added(tile(0, 7))
    sums = ChannelSums().added(tile(0, 7))
    for statistic in (largest, sums):
        moved = statistic.map_rows(lambda t: t[[2, 0]])
        for before, after in zip(statistic.tensors, moved.tensors, strict=True):
            assert torch.equal(after, before[[2, 0]])
    squares = QuerySquares(2).begun(Coming(VALID, 7, torch.zeros(3, dtype=torch.int64), None)).added(tile(0, 7))
    whole = squares.mean(SINGLE_RANK, 2)
    moved = squares.map_rows(lambda t: t[[2, 0]]).mean(SINGLE_RANK, 2)
    assert all(torch.equal(after, before[[2, 0]]) for before, after in zip(whole, moved, strict=True))
    for empty in (LargestQueries(), ChannelSums()):
        assert not [*empty.tensors] and not [*empty.map_rows(torch.clone).tensors]


@pytest.mark.parametrize("width", [1, 3, 9])
@pytest.mark.parametrize("pieces", [[0, 7], [0, 3, 7], [0, 1, 2, 7]])
@pytest.mark.parametrize("joined", [False, True])
def test_mean_squares_are_those_of_the_newest_queries(width: int, pieces: list[int], joined: bool) -> None:
    """Row by row, over the query heads of each KV head; a row of padding alone has none."""
    valid = VALID.clone()
    valid[2] = False
    seen = torch.zeros(3, dtype=torch.int64)
    found = QuerySquares(width) if joined else QuerySquares(width).begun(Coming(valid, 7, seen, None))
    for start, stop in pairwise(pieces):
        at = slice(start, stop)
        if joined:
            one = Tile(Q[:, :, at], K[:, :, at], 0, valid[:, at], True)
            later = QuerySquares(width).begun(Coming(valid[:, at], stop - start, seen, None)).added(one)
            found = later if found.window is None else found.joined(later, start)
        else:
            found = found.added(Tile(Q[:, :, at], K[:, :, at], start, valid[:, at], (start, stop) == (0, 7)))
    mean, has_query = found.mean(SINGLE_RANK, 2)
    assert has_query.tolist() == [True, True, False] and not found.reads_past
    assert not found.reduced(candidates_of(K, valid, ScoreTransform(1.0))), "selectors do not see it"
    for row in range(3):
        for head in range(2):
            newest = Q[row, 2 * head : 2 * head + 2][:, valid[row]][:, -width:].double()
            want = newest.square().mean((0, 1)) if newest.numel() else torch.zeros(8)
            torch.testing.assert_close(mean[row, head], want.float())
