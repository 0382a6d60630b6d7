"""Queries that attend to a token less than to the mean token, counted against one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.selectors.scissorhands import BELOW_MEAN, BelowMean
from kvpolicy.statistics.windows import Past, ScoreTransform
from tests.conformance.bench import draw
from tests.engine.parts import candidates_of, newest_queries
from tests.sampling import product


def counted(weights: Tensor, at: list[int], past: Tensor | None, valid: Tensor | None) -> list[list[float]]:
    """How many rows of `weights` [Hq, W, N] ignore each token, one by one; `past` [S], `valid` [P]: what is there."""
    new = weights.shape[2] - (0 if past is None else len(past))
    found = [[0.0] * weights.shape[2] for _ in weights]
    for head, rows in enumerate(weights.tolist()):
        for row, column in zip(rows, at, strict=True):
            there = [] if past is None else past.tolist()
            there += [j <= column and (valid is None or bool(valid[j])) for j in range(new)]
            for j, weight in enumerate(row):
                found[head][j] += column >= 0 and there[j] and weight * sum(there) < BELOW_MEAN
    return found


MASKS = [None, [1] * 11, [0, 0, 0, *[1] * 8], [1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0], [0] * 10 + [1]]


@product("held,mask,width", [0, 5], MASKS, [1, 4, 40])
def test_counts(held: int, mask: list[int] | None, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over padding, empty slots and rows with fewer queries than the window has, in tiles of sixteen queries."""
    monkeypatch.setattr("kvpolicy.statistics.windows.TILE_ELEMENTS", 1)
    q, k, _ = draw(11, 3, heads=2, group=2, sharp=1.0)
    valid = None if mask is None else torch.tensor([mask]).bool()
    past = None
    if held:
        _, keys, values = draw(held, 5)
        past = Past(keys, values, torch.tensor([1, 0, 1, 1, 0]).bool().expand(1, 2, -1))
    transform = ScoreTransform(0.35)
    window = newest_queries(q, valid, width)
    got = BelowMean(width, window).reduced(candidates_of(k, valid, transform, past))
    every = k if past is None else torch.cat([past.keys, k], 2)
    for head in range(4):
        score = window.queries[0, head] @ every[0, head // 2].T * 0.35
        for row, column in enumerate(window.at[0].tolist()):
            for j in range(every.shape[2]):
                new = j - held
                if new >= 0:
                    lacks = new > column or (valid is not None and not valid[0, new])
                else:
                    lacks = past is None or not past.occupied[0, 0, j]
                if lacks:
                    score[row, j] = -torch.inf
        want = counted(
            torch.softmax(score, -1)[None],
            window.at[0].tolist(),
            None if past is None else past.occupied[0, 0],
            None if valid is None else valid[0],
        )
        assert got[0, head].tolist() == want[0]
