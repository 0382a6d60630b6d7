"""Selectors at their limits: windows, shares and tiles that hold with equality, and states that share no memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy import H2O, ExpectedAttention, KVzip, ProbeSalience, Scissorhands, SnapKV
from kvpolicy.engine.selection import highest
from kvpolicy.kernels.rotary import KeyRotation
from kvpolicy.protocols import View
from kvpolicy.protocols.selector import Scores
from kvpolicy.selectors import expected
from kvpolicy.selectors.scissorhands import BelowMean
from kvpolicy.statistics import Candidates, Moments, ObservedMoments, Replay, Results, Vectors
from tests.selectors.test_expected import DIM, scores


def view(count: int, budget: int) -> View:
    """One row and head of `count` tokens."""
    return View(torch.arange(count, dtype=torch.int32)[None, None], torch.tensor([count]), torch.tensor([budget]), 0)


@pytest.mark.parametrize(("recent", "budget", "window"), [(0.07, 100, 7), (0.5, 9, 5), (0.0, 9, 1), (1.0, 9, 9)])
def test_the_window_of_h2o_is_rounded_up(recent: float, budget: int, window: int) -> None:
    priority = H2O(recent=recent).priority(Scores(torch.zeros(1, 1, 200)), view(200, budget))
    assert int((priority == torch.inf).sum()) == window


@pytest.mark.parametrize(("budget", "window"), [(1, 1), (2, 1), (3, 1), (7, 3), (8, 4), (99, 4)])
def test_the_window_of_snapkv_is_at_most_half_the_budget(budget: int, window: int) -> None:
    priority = SnapKV(window=4).priority(Scores(torch.zeros(1, 1, 200)), view(200, budget))
    assert (priority == torch.inf).nonzero()[:, -1].tolist() == [*range(200 - window, 200)]


def test_sinks_leave_room_for_the_newest_token_alone() -> None:
    given = view(9, 6)
    priority = Scissorhands(sinks=5, recent=3).priority(Scores(torch.zeros(1, 1, 9)), given)
    assert highest(priority, given, given.budget[:, None])[0, 0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4, 8]


@pytest.mark.parametrize(("added", "left"), [(0, 1.0), (6, 0.25), (8, 0.0), (20, 0.0)])
def test_counts_leave_the_window_and_no_more(added: int, left: float) -> None:
    given = view(4, 4)._replace(added=torch.tensor([added]))
    seen = Results({BelowMean: torch.zeros(1, 1, 4)})
    state: Any = Scissorhands(window=8).observe(Scores(torch.full((1, 1, 4), 2.0)), seen, given)
    assert state.score.tolist() == [[[2 * left] * 4]]


def test_a_replayed_token_without_attention_ranks_below_all_others() -> None:
    selector = KVzip(sinks=0)
    replay = torch.tensor([[[0.0, 0.5, -1.0, 1e-30]]])
    state: Any = selector.observe(selector.alloc(1, 1, 4, "cpu"), Results({Replay: replay}), view(4, 4))
    assert state.score.sign().tolist() == [[[-1, -1, 0, -1]]]
    assert selector.priority(state, view(5, 4)._replace(positions=view(4, 4).positions)).argsort().tolist() == [
        [[0, 3, 1, 2]]
    ]


@pytest.mark.parametrize(("budget", "sinks"), [(2, 1), (5, 2), (6, 3), (7, 3), (20, 3)])
def test_sinks_take_at_most_half_the_budget(budget: int, sinks: int) -> None:
    state: Any = KVzip(sinks=3).alloc(1, 1, 9, "cpu")
    priority = KVzip(sinks=3).priority(state, view(9, budget))
    assert (priority == torch.inf).nonzero()[:, -1].tolist() == [*range(sinks), 8]


def test_sums_and_numbers_of_probes_are_counted_apart() -> None:
    state: Any = ProbeSalience().alloc(1, 1, 3, "cpu")
    ProbeSalience().step(state, torch.full((1, 1, 1, 3), 0.25), view(3, 3))
    assert state.attn_sum.tolist() == [[[0.25] * 3]] and state.probes.tolist() == [[[1.0] * 3]]


@pytest.mark.parametrize("tile", [1, 4])
def test_keys_are_scored_in_tiles(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(1, heads, 9, DIM, generator=generator) for heads in (4, 2, 2))
    want = scores(queries, keys, values).score
    monkeypatch.setattr(expected, "_TILE", tile)
    torch.testing.assert_close(scores(queries, keys, values).score, want)


def test_the_length_that_was_scored_does_not_grow_with_the_row() -> None:
    """A store counts the tokens of its rows in place."""
    selector = ExpectedAttention(sinks=0)
    given = view(6, 4)
    state: Any = selector.alloc(1, 1, 6, "cpu")
    moments = expected.QueryMoments(torch.ones(1), torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4, 4))
    state = state._replace(total=moments.total, product=moments.product)
    keys = torch.randn(1, 1, 6, 4)
    observed = ObservedMoments(moments, KeyRotation(None))
    seen = Results({Vectors: Candidates(keys, keys, 0.5), Moments: observed})
    after: Any = selector.observe(state, seen, given)
    given.length.add_(3)
    assert after.ranked.tolist() == [6]
