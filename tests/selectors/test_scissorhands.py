"""Scissorhands: its vector, its window, and weights that are at the mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy.engine.selection import highest
from kvpolicy.protocols import View
from kvpolicy.protocols.selector import Scores
from kvpolicy.selectors.scissorhands import Scissorhands
from tests.conformance.bench import Bench, draw, padding


def test_the_vector() -> None:
    """One sink and one recent token, then the two most important."""
    view = View(torch.arange(6, dtype=torch.int32)[None, None], torch.tensor([6]), torch.tensor([4]), 0)
    ignored = -torch.tensor([[[0.1, 0.9, 0.2, 0.8, 0.3, 0.4]]])
    priority = Scissorhands(sinks=1, recent=1).priority(Scores(ignored), view)
    assert highest(priority, view, view.budget[:, None])[0, 0].nonzero()[:, 0].tolist() == [0, 1, 3, 5]


def test_ties_keep_the_earlier_and_the_recent() -> None:
    view = View(torch.arange(9, dtype=torch.int32)[None, None], torch.tensor([9]), torch.tensor([6]), 0)
    for recent, kept in ((2, [0, 1, 2, 3, 7, 8]), (3, [0, 1, 2, 6, 7, 8]), (10, [0, 1, 2, 6, 7, 8])):
        priority = Scissorhands(recent=recent).priority(Scores(torch.zeros(1, 1, 9)), view)
        assert highest(priority, view, view.budget[:, None])[0, 0].nonzero()[:, 0].tolist() == kept


def test_equal_weights_ignore_nothing() -> None:
    """However rounding falls: all are at the mean."""
    bench = Bench("scissorhands:window=50:recent=1", [9, 7])
    for number, size in enumerate([23, 1, 1, 1, 13, 1]):
        q, k, v = draw(size, number, batch=2)
        bench.forward(torch.zeros_like(q), k, v, padding(23, 23, 17) if number == 0 else None)
        state: Any = bench.layer.tensors.state
        assert not state.score.any()
    assert bench.turns[-1].kept[0][0] == [*range(8), 39] and bench.turns[-1].kept[1][0] == [*range(6), 33]


def test_counts_leave_the_window() -> None:
    """All of them with a prompt as long as the window, and their share with each token."""
    bench = Bench("scissorhands:window=8:recent=1", [12])
    q, k, v = draw(20, 0)
    bench.forward(q * 4, k, v)
    before: Any = bench.layer.tensors.state.score.clone()
    assert float(before.max()) > 2 and float(before.max()) <= 8
    bench.forward(torch.zeros(1, 4, 1, 8), *draw(1, 1)[1:])
    occupied = bench.layer.tensors.positions < 20
    torch.testing.assert_close(bench.layer.tensors.state.score[occupied], (before * (1 - 1 / 8))[occupied])
    bench.forward(torch.zeros(1, 4, 8, 8), *draw(8, 2)[1:])
    assert not bench.layer.tensors.state.score.any()


def test_padding_of_a_later_prompt_takes_nothing_from_counts() -> None:
    """A row loses the share of its own tokens, as it does alone."""
    both = Bench("scissorhands:window=16:recent=1", [12, 12])
    alone = Bench("scissorhands:window=16:recent=1", [12])
    for number, lengths in enumerate([(20, 20), (8, 3)]):
        q, k, v = draw(lengths[0], number, batch=2)
        both.forward(q * 4, k, v, padding(lengths[0], *lengths))
        alone.forward(*(t[1:, :, -lengths[1] :] for t in (q * 4, k, v)))
    assert both.turns[-1].kept[1] == alone.turns[-1].kept[0]
    found: list[dict[int, float]] = []
    for bench, row in ((both, 1), (alone, 0)):
        layer: Any = bench.layer
        scores = zip(layer.tensors.positions[row, 0].tolist(), layer.tensors.state.score[row, 0].tolist(), strict=True)
        found.append({position: score for position, score in scores if position >= 0})
    assert found[0] == pytest.approx(found[1])
