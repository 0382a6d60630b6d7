"""The newest queries of a prompt, from chunks as from one piece."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.statistics.recent_queries import RecentQueries
from kvpolicy.statistics.statistic import Coming, Tile
from kvpolicy.statistics.windows import ScoreTransform, window_attention
from tests.engine.parts import candidates_of, generator, newest_queries

Q, K = (torch.randn(2, heads, 9, 4, generator=generator(heads)) for heads in (4, 2))
VALID = torch.tensor([[1] * 9, [0, 0, 1, 1, 1, 0, 1, 0, 0]]).bool()


def gather(start: int, stop: int) -> RecentQueries:
    at = slice(start, stop)
    coming = Coming(VALID[:, at], stop - start, VALID[:, :start].sum(-1), None)
    return RecentQueries(3).begun(coming).added(Tile(Q[:, :, at], K[:, :, at], 0, VALID[:, at], True))


@pytest.mark.parametrize("first", [1, 3, 8])
def test_attention_is_that_of_the_newest_queries(first: int) -> None:
    found = gather(0, first).joined(gather(first, 9), first)
    candidates = candidates_of(K, VALID, ScoreTransform(0.5))
    expected = window_attention(newest_queries(Q, VALID, 3), K, ScoreTransform(0.5), None, VALID)
    assert torch.equal(found.reduced(candidates).weights, expected)
    assert found.reads_past and len([*found.tensors]) == 2 and not [*RecentQueries(3).tensors]
