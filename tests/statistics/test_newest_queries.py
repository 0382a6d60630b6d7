"""The newest queries of a prompt as they are, from chunks as from one piece."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.statistics.newest_queries import NewestQueries
from kvpolicy.statistics.statistic import Coming, Tile
from kvpolicy.statistics.windows import ScoreTransform
from tests.engine.parts import candidates_of, generator

Q, K = (torch.randn(2, heads, 9, 4, generator=generator(heads)) for heads in (4, 2))
VALID = torch.tensor([[1] * 9, [0, 0, 1, 1, 1, 0, 1, 0, 0]]).bool()


def gather(start: int, stop: int) -> NewestQueries:
    at = slice(start, stop)
    coming = Coming(VALID[:, at], stop - start, VALID[:, :start].sum(-1), None)
    return NewestQueries(3).begun(coming).added(Tile(Q[:, :, at], K[:, :, at], 0, VALID[:, at], True))


@pytest.mark.parametrize("first", [1, 3, 8])
def test_queries_are_the_newest_ones(first: int) -> None:
    found = gather(0, first).joined(gather(first, 9), first)
    seen = found.reduced(candidates_of(K, VALID, ScoreTransform(0.5)))
    assert torch.equal(seen[0], Q[0, :, 6:]) and torch.equal(seen[1], Q[1, :, [3, 4, 6]])
    assert not found.reads_past and len([*found.tensors]) == 2
