"""Layers are compared and put together by the written rules."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvpolicy.calibration.grouping import Directions, divergence, group_layers, parse_groups


def slow(a: Tensor, b: Tensor, bins: int) -> float:
    """The divergence of [H, n, D], one number at a time."""
    a, b = (x.flatten(0, 1).double() / x.flatten(0, 1).double().norm(dim=-1, keepdim=True) for x in (a, b))
    both = torch.cat([a, b])
    axes = torch.linalg.svd(both - both.mean(0), full_matrices=False).Vh[:2]
    flat = both @ axes.T
    counts = [[[0] * bins for _ in range(bins)] for _ in range(2)]
    low = flat.min(0).values
    high = flat.max(0).values
    for place, point in enumerate(flat):
        x, y = (min(int((point[i] - low[i]) / (high[i] - low[i]) * bins), bins - 1) for i in range(2))
        counts[int(place >= len(a))][x][y] += 1
    total = 0.0
    for x in range(bins):
        for y in range(bins):
            p = counts[0][x][y] / len(a)
            q = counts[1][x][y] / len(b)
            total += sum(part / 2 * math.log2(part / ((p + q) / 2)) for part in (p, q) if part)
    return total


def some(seed: int, shift: float = 0.0, count: int = 300) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, count, 6, generator=generator) * torch.tensor([5.0, 3.0, 1, 1, 1, 1]) + shift


@pytest.mark.parametrize("bins", [4, 10])
def test_the_divergence_against_its_definition(bins: int) -> None:
    a = some(0)
    b = some(1, 2.0)
    assert divergence(Directions.of(a), Directions.of(b), bins) == pytest.approx(slow(a, b, bins), abs=0.02)


def test_the_divergence_of_extremes() -> None:
    a = some(0, 50.0)
    b = some(1, -50.0)
    assert divergence(Directions.of(a), Directions.of(a)) == 0
    assert divergence(Directions.of(a), Directions.of(b)) == pytest.approx(1)
    assert divergence(Directions.of(torch.zeros(1, 5, 6)), Directions.of(torch.zeros(1, 5, 6))) == 0
    assert divergence(Directions.of(a), Directions.of(b)) == divergence(Directions.of(b), Directions.of(a))


def test_every_pair_of_a_group_is_alike() -> None:
    apart = {(0, 1): 0.1, (1, 2): 0.1, (0, 2): 0.3, (2, 3): 0.2, (2, 4): 0.1, (3, 4): 0.21}
    assert group_layers(range(5), lambda a, b: apart[a, b]) == [[0, 1], [2, 3], [4]]


def test_a_group_is_no_long_chain() -> None:
    assert group_layers(range(9), lambda a, b: 0.15, chain=0.31) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert group_layers([], lambda a, b: 0.0) == []
    assert group_layers([1, 5], lambda a, b: 0.0) == [[1, 5]]


def test_groups_are_read() -> None:
    assert parse_groups("0, 1-2,3", range(4)) == [[0], [1, 2], [3]]
    assert parse_groups("each", [1, 3]) == [[1], [3]]
    assert parse_groups("all", [1, 3]) == parse_groups("0-3", [1, 3]) == [[1, 3]]


@pytest.mark.parametrize("text", ["0,1", "0-3,3", "0-4,9", "x", "", "0-3,", "1-0,2,3", "-1,0-3"])
def test_groups_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="group"):
        parse_groups(text, range(4))
