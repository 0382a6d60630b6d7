"""Rows of attention that a selector reduces, in tiles, against one matrix of them all."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvpolicy.statistics import AttentionRows
from kvpolicy.statistics.reduced_rows import ReducedRows
from kvpolicy.statistics.statistic import Coming, Tile
from kvpolicy.statistics.windows import ScoreTransform, window_attention
from tests.conformance.bench import draw
from tests.engine.parts import candidates_of, newest_queries

VALID = torch.tensor([[1] * 40, [0] * 12 + [1, 0] + [1] * 26, [0] * 40]).bool()


@dataclass
class Weighted:
    """Sums rows, each times its position and the positions of the tokens, and keeps what it was asked."""

    asked: list[AttentionRows] = field(default_factory=list)

    def reduce(self, rows: AttentionRows) -> Tensor:
        self.asked.append(rows)
        tokens = rows.positions.repeat_interleave(rows.weights.shape[1] // rows.positions.shape[1], 1)
        return (rows.weights * (rows.queries + 1)[:, None, :, None]).sum(2) * (tokens + 1)


@pytest.mark.parametrize("valid", [None, VALID])
@pytest.mark.parametrize("cuts", [[40], [1, 39], [16, 3, 21]])
def test_all_rows_with_their_positions(valid: Tensor | None, cuts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy.statistics.windows.TILE_ELEMENTS", 1)
    q, k, _ = draw(40, 3, batch=3, heads=2, group=2)
    reducer = Weighted()
    start = 0
    found = None
    for size in cuts:
        at = slice(start, start + size)
        mask = None if valid is None else valid[:, at]
        seen = torch.tensor([start] * 3) if valid is None else valid[:, :start].sum(-1)
        one = ReducedRows(reducer).begun(Coming(mask, size, seen, None))
        one = one.added(Tile(q[:, :, at], k[:, :, at], 0, mask, True))
        found = one if found is None else found.joined(one, start)
        start += size
    assert found is not None
    candidates = candidates_of(k, valid, ScoreTransform(0.3))
    whole = window_attention(newest_queries(q, valid, 40), k, ScoreTransform(0.3), None, valid)
    order = newest_queries(q, valid, 40).at
    places = candidates.positions[:, 0].gather(1, order.clamp_min(0)).where(order >= 0, -1)
    expected = Weighted().reduce(AttentionRows(whole, places, candidates.positions))
    torch.testing.assert_close(found.reduced(candidates), expected)
    assert len(reducer.asked) == 3 and max(rows.weights.shape[2] for rows in reducer.asked) == 16
    assert reducer.asked[0].weights.shape[3] < 40, "no key behind the queries of a tile is multiplied"


def test_nothing_but_padding() -> None:
    reducer = Weighted()
    q, k, _ = draw(5, 0)
    valid = torch.zeros(1, 5, dtype=torch.bool)
    one = ReducedRows(reducer).begun(Coming(valid, 5, torch.zeros(1).long(), None)).added(Tile(q, k, 0, valid, True))
    assert not one.reduced(candidates_of(k, valid, ScoreTransform(1.0))).any() and not reducer.asked
    assert one.reads_past and len([*one.tensors]) == 2 and not [*ReducedRows(reducer).tensors]
