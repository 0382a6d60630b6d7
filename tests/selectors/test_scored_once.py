"""Selectors of keys and values alone: knorm, and those that score a token once, lagkv and cur."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.protocols import View
from kvpolicy.selectors.cur import CUR
from kvpolicy.selectors.lagkv import LagKV
from kvpolicy.selectors.once import OnceScored, none_scored
from kvpolicy.statistics import Candidates, Results, Vectors
from tests.conformance.bench import Bench, draw, padding

KEYS = [[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.0, 0.9]]
VALUES = [[10.0, 0.0], [6.0, 2.0], [0.0, 10.0], [0.0, 8.0]]


def scored(selector: LagKV | CUR, keys: Tensor, values: Tensor, budget: int) -> OnceScored:
    count = keys.shape[2]
    positions = torch.arange(count, dtype=torch.int32).expand(*keys.shape[:2], -1)
    view = View(positions, torch.tensor([count]), torch.tensor([budget]), 0)
    got = selector.observe(
        none_scored(1, keys.shape[1], count, "cpu"), Results({Vectors: Candidates(keys, values, 1.0)}), view
    )
    assert isinstance(got, OnceScored)
    return got


def test_the_vector_of_cur() -> None:
    """Its numbers sum to 1; ours are over the size of the window."""
    got = scored(CUR(sinks=0, window=4), torch.tensor([[KEYS]]), torch.tensor([[VALUES]]), 2).score[0, 0]
    assert (got / got.sum()).tolist() == pytest.approx([0.351321, 0.115233, 0.351321, 0.182125], abs=1e-6)


@pytest.mark.parametrize("of", ["product", "keys", "values", "mean"])
def test_a_window_of_zeros(of: str) -> None:
    got = scored(CUR(sinks=0, window=4, of=of), torch.zeros(1, 1, 8, 2), torch.zeros(1, 1, 8, 2), 4)  # pyright: ignore
    assert got.scored.all() and not got.score.any()


def test_a_token_alone_in_its_window_is_below_those_without_a_score() -> None:
    got = scored(CUR(sinks=0, window=1), torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2), 2)
    assert float(got.score.min()) > 0.999 and float(got.score.max()) < 1


def test_constant_channels_of_the_next_lag_count_as_nothing() -> None:
    keys = torch.randn(1, 1, 12, 4, generator=torch.Generator().manual_seed(0))
    keys[:, :, 4:8] = 1.0
    got = scored(LagKV(sinks=0, lag=4), keys, torch.ones(1, 1, 12, 4), 16)
    # The first lag has no range to compare with: its tokens are ranked by position, the earlier one higher.
    assert got.score[0, 0, :4].tolist() == [0.75, 0.5, 0.25, 0.0]
    assert got.scored[0, 0].tolist() == [True] * 8 + [False] * 4 and got.score.isfinite().all()


def test_a_lag_is_at_most_a_quarter_of_the_budget() -> None:
    """So that tokens without a score, which are kept whole, leave room for others."""
    bench = Bench("lagkv:sinks=0:lag=128", [32, 32])
    bench.forward(*draw(100, 0, batch=2), padding(100, 100, 60))
    state = bench.layer.tensors.state
    assert isinstance(state, OnceScored)
    assert (state.scored.sum(-1) >= 16).all()
    bench.check()


def test_numbers_of_invalid_tokens_are_ignored() -> None:
    for spec in ("lagkv:sinks=1:lag=2", "cur:sinks=1:window=3", "knorm"):
        bench = Bench(spec, [8, 6])
        q, k, v = draw(20, 3, batch=2)
        mask = padding(20, 20, 11)
        k[1, :, :9] = torch.inf
        v[1, :, :9] = torch.nan
        bench.forward(q, k, v, mask)
        assert bench.check().turns == 2
