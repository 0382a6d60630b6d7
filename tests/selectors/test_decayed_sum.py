"""Attention of the newest queries, each times a factor for every query behind it, against one by one."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.selectors.a2sf import DecayedSum
from kvpolicy.statistics.windows import Past, ScoreTransform
from tests.conformance.bench import draw
from tests.engine.parts import candidates_of, newest_queries
from tests.sampling import product

MASKS = [None, [0, 0, 0, *[1] * 8], [1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0], [0] * 10 + [1]]


@product("held,mask,width,factor", [0, 5], MASKS, [1, 4, 40], [0.01, 0.7])
def test_sums(held: int, mask: list[int] | None, width: int, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over padding, empty slots and rows with fewer queries than the window has, in tiles of sixteen queries."""
    monkeypatch.setattr("kvpolicy.statistics.windows.TILE_ELEMENTS", 1)
    q, k, _ = draw(11, 3, heads=2, group=2, sharp=1.0)
    valid = None if mask is None else torch.tensor([mask]).bool()
    past = None
    if held:
        _, keys, values = draw(held, 5)
        past = Past(keys, values, torch.tensor([1, 0, 1, 1, 0]).bool().expand(1, 2, -1))
    window = newest_queries(q, valid, width)
    got = DecayedSum(width, factor, window).reduced(candidates_of(k, valid, ScoreTransform(0.35), past))
    every = k if past is None else torch.cat([past.keys, k], 2)
    there = torch.ones(11).bool() if valid is None else valid[0]
    for hq in range(4):
        expected = torch.zeros(held + 11)
        own = [column for column in range(11) if there[column]]
        for age, column in enumerate(reversed(own[-width:])):
            sees = torch.cat([torch.tensor([1, 0, 1, 1, 0]).bool()[:held], there & (torch.arange(11) <= column)])
            score = (every[0, hq // 2] @ q[0, hq, column] * 0.35).masked_fill(~sees, -torch.inf)
            expected += factor**age * torch.softmax(score, 0)
        torch.testing.assert_close(got[0, hq], expected)
