"""Value regression: its limits, and that it lowers the error that it is fitted to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy import Regress
from kvpolicy.protocols import Candidates
from kvpolicy.statistics import Replay, ReplayedRows
from kvpolicy.statistics.statistic import first_of


def prompt(kept: list[int], count: int = 24, seed: int = 0, sink: float = 0.0) -> Candidates:
    """Random tokens of two heads with two query heads each, of which some are kept."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(1, 2, count, 8, generator=generator) for _ in range(2))
    rows = torch.randn(1, 4, 6, count, generator=generator).mul(2).softmax(-1) * (1 - sink)
    positions = torch.arange(count, dtype=torch.int32).expand(1, 2, -1)
    targets = torch.tensor(kept).expand(1, 2, -1)
    is_kept = torch.zeros(1, 2, count, dtype=torch.bool).scatter(-1, targets, True)
    there = torch.ones_like(targets, dtype=torch.bool)
    sinks = torch.full((1, 4, 6), sink) if sink else None
    return Candidates(keys, values, positions, is_kept, targets, there, None, rows, torch.tensor([count]), sinks=sinks)


def error(given: Candidates, values: Tensor, sink: float = 0.0) -> float:
    """The squared error of the window's outputs with these values [1, 2, T, D] of the targets."""
    assert given.attention is not None
    rows = given.attention.unflatten(1, (2, 2)).flatten(2, 3)
    full = rows @ given.values
    kept = rows.gather(-1, given.targets[:, :, None].expand(-1, -1, rows.shape[2], -1))
    return float((full - kept / (kept.sum(-1, keepdim=True) + sink) @ values).square().sum())


KEPT = [0, 3, 4, 9, 11, 17, 20, 23]


@pytest.mark.parametrize("sink", [0.0, 0.4])
def test_the_smaller_the_penalty_the_smaller_the_error(sink: float) -> None:
    given = prompt(KEPT, sink=sink)
    base = error(given, given.at_targets(given.values), sink)
    errors = [
        error(given, Regress(window=6, ridge=ridge, sinks=0, recent=0).merge_prompt((), given).values, sink)
        for ridge in (100.0, 1.0, 0.1, 0.01, 1e-6)
    ]
    assert sorted([base, *errors], reverse=True) == [base, *errors]
    assert errors[-1] < 0.6 * base


def test_sinks_and_recent_values_stay() -> None:
    given = prompt(KEPT)
    before = given.at_targets(given.values)
    after = Regress(window=6, sinks=4, recent=4).merge_prompt((), given).values
    changed = (before != after).any(-1)[0, 0].tolist()
    assert changed == [False, False, True, True, True, True, False, False]


def test_queries_before_the_window_do_not_count() -> None:
    """A selector may ask for the attention of more queries."""
    given = prompt(KEPT)
    assert given.attention is not None
    fewer = given._replace(attention=given.attention[:, :, 2:])
    results = [Regress(window=4, sinks=0, recent=0).merge_prompt((), each).values for each in (given, fewer)]
    assert torch.equal(results[0], results[1])
    whole = Regress(window=6, sinks=0, recent=0).merge_prompt((), given).values
    assert not torch.allclose(results[0], whole, atol=1e-3)


@pytest.mark.parametrize("length", [1, 2])
def test_fewer_tokens_than_queries(length: int) -> None:
    """Rows of zeros stand for the queries that there are not, and one token is all that a later one has to change."""
    given = prompt([0], count=length)
    assert given.attention is not None
    rows = given.attention.clone()
    rows[:, :, : 6 - length] = 0
    result = Regress(window=6, sinks=0, recent=0).merge_prompt((), given._replace(attention=rows))
    assert bool(result.values.isfinite().all()) and torch.equal(result.values, given.values[:, :, :1]) == (length == 1)


def test_queries_of_a_replay() -> None:
    """They are fitted like those of the window, and a later prompt, which is not replayed, stays."""
    given = prompt(KEPT)
    merger = Regress(queries="replay", window=6, sinks=0, recent=0)
    assert [type(each) for each in merger.statistics] == [Replay, ReplayedRows]
    assert first_of(ReplayedRows, merger.statistics) == ReplayedRows(6)
    want = Regress(window=6, sinks=0, recent=0).merge_prompt((), given).values
    replayed = given._replace(attention=None, replay_attention=given.attention)
    assert torch.equal(merger.merge_prompt((), replayed).values, want)
    assert torch.equal(merger.merge_prompt((), given).values, given.at_targets(given.values))
