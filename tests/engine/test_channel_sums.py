"""Sums and largest values of channels, from tiles and chunks as from one piece."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kvpolicy.engine.attention import ScoreTransform, largest_queries
from kvpolicy.engine.channel_sums import ChannelSums, LargestQueries
from kvpolicy.engine.reading import absolute_sums
from kvpolicy.engine.statistic import Coming, Tile
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
    largest, sums = LargestQueries().begun(coming), ChannelSums().begun(coming)
    for start, stop in pairwise(pieces):
        one = tile(start, stop)
        if joined:
            largest = largest.joined(LargestQueries().begun(coming).added(one), start)
            sums = sums.joined(ChannelSums().begun(coming).added(one), start)
        else:
            largest, sums = largest.added(one), sums.added(one)
    assert largest.absmax is not None and sums.sums is not None
    assert torch.equal(largest.absmax, largest_queries(Q, 2, VALID))
    for found, expected in zip(sums.sums, absolute_sums(Q, K, VALID), strict=True):
        assert torch.allclose(found, expected)
    candidates = candidates_of(K, VALID, ScoreTransform(1.0))
    assert not largest.reduced(candidates) and not sums.reduced(candidates), "selectors see neither"


def test_rows_follow() -> None:
    largest, sums = LargestQueries().added(tile(0, 7)), ChannelSums().added(tile(0, 7))
    for statistic in (largest, sums):
        moved = statistic.map_rows(lambda t: t[[2, 0]])
        for before, after in zip(statistic.tensors, moved.tensors, strict=True):
            assert torch.equal(after, before[[2, 0]])
    for empty in (LargestQueries(), ChannelSums()):
        assert not [*empty.tensors] and not [*empty.map_rows(torch.clone).tensors]
