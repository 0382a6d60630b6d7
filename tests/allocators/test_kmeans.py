"""The exact division of numbers, against enumeration and against scikit-learn."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.allocators.squeeze import top_group


def enumerate_top(values: list[float], groups: int) -> tuple[int, float]:
    """Size of the top group, and the cost, over every contiguous division."""
    ranked = sorted(values)
    best = (float("inf"), 0)
    for cuts in itertools.combinations(range(1, len(ranked)), groups - 1):
        parts = [ranked[i:j] for i, j in itertools.pairwise([0, *cuts, len(ranked)])]
        cost = sum(float(((np.array(part) - np.mean(part)) ** 2).sum()) for part in parts)
        if cost < best[0] - 1e-12 or (cost < best[0] + 1e-12 and len(parts[-1]) > best[1]):
            best = (cost, len(parts[-1]))
    return best[1], best[0]


@given(st.lists(st.integers(0, 1000), min_size=4, max_size=9), st.integers(2, 4))
@settings(deadline=None)
def test_it_is_the_optimum(whole: list[int], groups: int) -> None:
    values = [number / 1000 for number in whole]
    got = top_group(torch.tensor(values, dtype=torch.float64), groups)
    size, _ = enumerate_top(values, groups)
    assert int(got.sum()) == size
    assert not bool(got.all())
    chosen = torch.tensor(values)[got]
    others = torch.tensor(values)[~got]
    assert chosen.min() >= others.max()


def test_of_equally_good_divisions_the_largest_top_group_wins() -> None:
    assert top_group(torch.tensor([0.0, 1.0, 2.0, 3.0]), 3).tolist() == [False, False, True, True]
    assert top_group(torch.tensor([0.0, 0.5, 0.5, 1.0]), 2).tolist() == [False, True, True, True]
    assert top_group(torch.full((4,), 0.003, dtype=torch.float64), 2).tolist() == [False, True, True, True]


@pytest.mark.parametrize("count", [2, 3, 7])
def test_as_many_groups_as_values(count: int) -> None:
    """Each is a group of its own; of equal ones, all but the least that other groups need are in the top group."""
    values = torch.arange(count).roll(2) / 8
    assert top_group(values, count).tolist() == (values == values.max()).tolist()
    assert int(top_group(torch.ones(count), count).sum()) == 1


def test_close_values_do_not_cancel() -> None:
    values = torch.tensor([0.9, 0.9 + 3e-6, 0.9 + 6e-6, 0.9 + 7e-6, 5.0], dtype=torch.float64)
    assert top_group(values[:4], 3).tolist() == [False, False, True, True]


def test_equal_values_stay_together() -> None:
    """Also where a start between them costs less than the tolerance, and one before them costs more."""
    values = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0 + 3.5e-5], dtype=torch.float64)
    assert top_group(values, 3).tolist() == [False, True, True, True, True, True]


@pytest.mark.parametrize("seed", range(8))
def test_scikit_learn_finds_no_better(seed: int) -> None:
    cluster = pytest.importorskip("sklearn.cluster")
    center = torch.tensor([0.55] * 3 + [0.8] * 6 + [0.97] * 15)
    values = center + 0.02 * torch.randn(24, generator=torch.Generator().manual_seed(seed))
    got = top_group(values, 3)
    found = cluster.KMeans(3, n_init=20, random_state=0).fit(values.double().numpy()[:, None])
    assert got.tolist() == (found.labels_ == found.cluster_centers_.argmax()).tolist()
