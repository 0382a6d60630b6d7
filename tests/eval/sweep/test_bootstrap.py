"""Bootstrap intervals: against a slow reference, and their coverage."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from kvpolicy_eval.sweep import bootstrap


@pytest.mark.parametrize("statistic", bootstrap.STATISTICS)
def test_bootstrap_against_a_slow_one(statistic: str) -> None:
    """Example by example, with the indices that the fast one draws."""
    generator = np.random.default_rng(1)
    values = [(-float(a), float(b)) for a, b in generator.uniform(1, 9, (7, 2))]
    values = [a for a, _ in values] if statistic == "mean" else values
    fast = bootstrap.draws(values, "task", statistic, 50)
    indices = np.random.default_rng(zlib.crc32(b"task")).integers(7, size=(50, 7))
    slow: list[float] = []
    for row in indices.tolist():
        slow.append(_plain([values[index] for index in row], statistic))
    np.testing.assert_allclose(fast, slow)
    assert bootstrap.statistic_of(values, _plain(values, statistic)) == statistic
    low, high = bootstrap.interval(fast)
    assert sorted(slow)[0] <= low < high <= sorted(slow)[-1]


def _plain(values: Any, statistic: str) -> float:
    """The statistic of some values, without arrays."""
    if statistic == "mean":
        return sum(values) / len(values)
    nats = -sum(a for a, _ in values) / sum(b for _, b in values)
    return float(np.exp(nats) if statistic == "perplexity" else nats / np.log(2))


def test_intervals_have_their_coverage() -> None:
    """Of 200 samples of 40 coins about 95 % have their probability inside."""
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        low, high = bootstrap.interval(bootstrap.draws(generator.binomial(1, 0.4, 40).tolist(), "coins", count=500))
        hits += low <= 0.4 <= high
    assert 180 <= hits <= 199


def test_two_policies_are_resampled_alike() -> None:
    one = bootstrap.draws([0, 1, 1, 0, 1], "task")
    np.testing.assert_allclose(one - bootstrap.draws([1, 0, 0, 1, 0], "task"), 2 * one - 1)
    assert not np.allclose(one, bootstrap.draws([0, 1, 1, 0, 1], "other"))


def test_what_cannot_be_resampled_has_no_interval() -> None:
    assert bootstrap.statistic_of([0.0, 1.0], 0.9) == ""
    assert bootstrap.statistic_of([["a", "b"], ["c", "d"]], 0.5) == ""
    assert bootstrap.statistic_of([], 0.5) == ""
