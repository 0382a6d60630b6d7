"""The options of a multiple-choice knapsack against the optimum."""

from __future__ import annotations

from random import Random

import pytest

from kvpolicy.planning.tuned import UNITS, Option, choose
from tests.reference.knapsack import least_loss
from tests.sampling import product


def cost(items: list[list[Option]], chosen: list[int]) -> int:
    return sum(options[index].cost for options, index in zip(items, chosen, strict=True))


def loss(items: list[list[Option]], chosen: list[int]) -> float:
    return sum(options[index].loss for options, index in zip(items, chosen, strict=True))


def draw(dice: Random, count: int, options: int) -> list[list[Option]]:
    """Items whose losses fall with cost, as curves of distortion do, and options that nobody should choose."""
    items: list[list[Option]] = []
    for _ in range(count):
        scale = 10 ** dice.uniform(-2, 1)
        costs = sorted(dice.randint(1, 60) for _ in range(options))
        items.append([Option(c, scale * dice.uniform(0.5, 1.5) / c ** dice.uniform(0.5, 2)) for c in costs])
    return items


@product("seed", range(60), sample=[(seed,) for seed in range(20)])
def test_random_options(seed: int) -> None:
    dice = Random(seed)
    items = draw(dice, dice.randint(1, 12), dice.randint(1, 12))
    for limit in (0, 10, 50, 120, 300, 700):
        chosen = choose(items, limit)
        best = least_loss(items, limit)
        if best is None:
            assert chosen is None
            continue
        assert chosen is not None and cost(items, chosen) <= limit
        assert loss(items, chosen) >= best - 1e-12
        # What one step of one item can be away from the optimum of the relaxation.
        largest = max(max(o.loss for o in options) - min(o.loss for o in options) for options in items)
        assert loss(items, chosen) <= best + largest


@product("seed", range(10), sample=[(seed,) for seed in range(3)])
def test_within_one_percent_of_the_optimum_for_many_options(seed: int) -> None:
    """As in a tuning: many layers, and many sizes of each."""
    dice = Random(seed)
    items: list[list[Option]] = []
    for _ in range(16):
        scale = 10 ** dice.uniform(-1, 1)
        power = dice.uniform(0.5, 2)
        items.append([Option(c, scale * dice.uniform(0.9, 1.1) / c**power) for c in range(2, 60)])
    for limit in (80, 160, 320, 640):
        chosen = choose(items, limit)
        best = least_loss(items, limit)
        assert chosen is not None and best is not None
        assert loss(items, chosen) <= 1.01 * best


@pytest.mark.parametrize("seed", range(6))
def test_costs_of_more_units_than_are_counted(seed: int) -> None:
    """Costs are then rounded up, so that what is chosen fits; the optimum of the exact costs is near."""
    dice = Random(seed)
    items = draw(dice, 8, 8)
    # Just above a multiple of the scale, so that a cost that is rounded down is too small by a whole unit.
    large = [[Option(option.cost * 1000 + dice.randint(1, 9), option.loss) for option in options] for options in items]
    for limit in (120, 200, 300):
        chosen = choose(large, limit * 1000)
        best = least_loss(items, limit - 1)
        assert best is not None and chosen is not None
        assert cost(large, chosen) <= limit * 1000 and loss(large, chosen) <= 1.05 * best


@pytest.mark.parametrize("scale", [1, 1000, UNITS + 1])
def test_the_whole_limit_is_used(scale: int) -> None:
    """By an option on the hull, and by one beside it that its rounded cost leaves out."""
    items = [[Option(scale, 9.0), Option(3 * scale, 1.0)], [Option(scale, 2.0), Option(2 * scale, 1.5)]]
    assert choose(items, 4 * scale) == [1, 0]
    assert choose(items, 5 * scale) == [1, 1]
    beside = [Option(scale, 10.0), Option(2 * scale, 8.0), Option(4 * scale, 1.0)]
    assert choose([beside], 2 * scale) == [1] and choose([beside], 2 * scale - 1) == [0]


def test_ties_and_equal_options() -> None:
    same = [Option(2, 1.0)] * 3
    assert choose([same, same], 4) == [0, 0]
    assert choose([same, same], 3) is None
    assert choose([[Option(0, 1.0), Option(0, 0.5)]], 0) == [1]
    assert choose([], 0) == []


def test_an_option_that_costs_more_and_loses_more_is_never_chosen() -> None:
    assert choose([[Option(1, 1.0), Option(2, 2.0)]], 10) == [0]
