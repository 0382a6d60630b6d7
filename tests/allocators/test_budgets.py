"""Uniform and Pyramid, and what holds for every allocator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy import registry
from kvpolicy.allocators.pyramid import Pyramid
from kvpolicy.allocators.uniform import Uniform

ALL = [registry.lookup(name)[1] for name in registry.names("allocator")]


def budgets(allocator: Any, total: list[int], layers: int, floor: int = 1, ceiling: int = 10**6, seed: int = 0) -> Any:
    metrics = torch.rand(len(total), layers, generator=torch.Generator().manual_seed(seed))
    most = torch.full((len(total),), ceiling)
    return allocator.budgets(metrics, torch.tensor(total), floor, most, layers)


def test_uniform_is_even() -> None:
    assert budgets(Uniform(), [12, 10], 4).tolist() == [[3, 3, 3, 3], [3, 3, 2, 2]]


def test_pyramid_falls_in_a_straight_line() -> None:
    got = budgets(Pyramid(), [32 * 120], 32)[0]
    assert got.sum() == 32 * 120
    assert (got[0], got[-1]) == (2 * 120 - 6, 6)
    steps = got.diff()
    assert steps.max() - steps.min() <= 1


def test_pyramid_with_a_beta_of_one_is_uniform() -> None:
    assert budgets(Pyramid(beta=1), [10], 4).tolist() == budgets(Uniform(), [10], 4).tolist()
    assert budgets(Pyramid(), [7], 1).tolist() == [[7]]


def test_pyramid_gives_what_the_first_layers_cannot_use_to_the_others() -> None:
    got = budgets(Pyramid(), [1000], 10, floor=8, ceiling=120)[0].tolist()
    assert got[0] == 120 and min(got) >= 8 and sum(got) == 1000
    assert got == sorted(got, reverse=True)


@pytest.mark.parametrize("beta", [0.5, -1, float("inf"), float("nan")])
def test_pyramid_refuses(beta: float) -> None:
    with pytest.raises(ValueError, match=r"Pyramid\.beta must be at least 1 and finite, got"):
        Pyramid(beta=beta)


@pytest.mark.parametrize("cls", ALL)
def test_sum_bounds_and_type(cls: Any) -> None:
    for layers in (1, 2, 3, 32):
        got = budgets(cls(), [layers * 50, layers * 33 + 1, layers * 5], layers, floor=5, ceiling=60)
        assert got.dtype == torch.int64 and got.shape == (3, layers)
        assert got.sum(-1).tolist() == [layers * 50, layers * 33 + 1, layers * 5]
        assert got.min() >= 5 and got.max() <= 60
    assert budgets(cls(), [8 * 100], 8, ceiling=100).tolist() == [[100] * 8], "all that there is"


@pytest.mark.parametrize("cls", ALL)
def test_a_batch_is_its_rows(cls: Any) -> None:
    cosine = torch.rand(4, 12, generator=torch.Generator().manual_seed(1))
    total = torch.tensor([300, 77, 1200, 500])
    ceiling = torch.tensor([100, 50, 90, 45])
    together = cls().budgets(cosine, total, 4, ceiling, 12)
    for row in range(4):
        one = slice(row, row + 1)
        alone = cls().budgets(cosine[one], total[one], 4, ceiling[one], 12)
        assert torch.equal(together[one], alone)
