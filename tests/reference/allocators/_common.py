"""Budgets for one row in exact fractions: what a share of a prompt is, and whole tokens near to targets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from ..exact import Number, exact, floor_share

NEAR = Fraction(1, 10**9)


def base_budget(budget: int | float, length: int, floor: int = 1) -> int:
    """Tokens per layer, on average, for a prompt of `length`: a share (float) or a count (int)."""
    base = max(1, floor_share(budget, length)) if isinstance(budget, float) else budget
    if base >= floor:
        return base
    if length <= floor:
        return floor
    smallest = f"{floor / length:.4g} (of {length} tokens)" if isinstance(budget, float) else str(floor)
    raise ValueError(f"The budget {budget} leaves {base} tokens per layer; use at least {smallest}.")


def _in_proportion(
    targets: list[Fraction], fixed: dict[int, Fraction], total: int, each: Fraction
) -> dict[int, Fraction]:
    """What is not fixed: `each` for every other layer, and the rest in proportion to their targets."""
    free = [i for i in range(len(targets)) if i not in fixed]
    left = total - sum(fixed.values())
    weight = sum(targets[i] for i in free)
    rest = left - each * len(free)
    return {i: each + rest * targets[i] / weight if weight else Fraction(left) / len(free) for i in free}


def fill(
    targets: Sequence[Number], total: int, floor: int, ceiling: int, each: Fraction = Fraction(0)
) -> list[Fraction]:
    """The one x_i = clamp(each + factor * t_i, floor, ceiling) whose sum is `total`."""
    goals = [exact(t) for t in targets]
    fixed: dict[int, Fraction] = {}
    while len(fixed) < len(goals):
        wish = _in_proportion(goals, fixed, total, each)
        gap = {i: min(max(x, Fraction(floor)), Fraction(ceiling)) - x for i, x in wish.items()}
        if not any(gap.values()):
            return [fixed.get(i, wish.get(i, Fraction(0))) for i in range(len(goals))]
        lift = sum(gap.values())  # > 0: the floors ask for more than the ceilings give back
        for i, change in gap.items():
            if change * lift > 0 or lift == 0:
                fixed[i] = wish[i] + change
    return [fixed[i] for i in range(len(goals))]


def round_to_total(amounts: Sequence[Fraction], total: int, ceiling: int | None = None) -> list[int]:
    """Whole tokens: round down, then the largest remainders get what is missing, ties to the lower layer."""
    snapped = [Fraction(math.ceil(x)) if math.ceil(x) - x < NEAR else x for x in amounts]
    whole = [math.floor(x) for x in snapped]
    order = sorted(range(len(whole)), key=lambda i: (-round(snapped[i] - whole[i], 9), i))
    missing = total - sum(whole)
    for i in [i for i in order if ceiling is None or whole[i] < ceiling][:missing]:
        whole[i] += 1
    assert sum(whole) == total, "rounding lost tokens"
    return whole


def waterfill(
    targets: Sequence[Number], total: int, floor: int, ceiling: int, each: Fraction = Fraction(0)
) -> list[int]:
    """Whole budgets that sum to `total`, as near to the targets as floor and ceiling allow."""
    layers = len(targets)
    if total >= layers * ceiling:
        return round_to_total([Fraction(total, layers)] * layers, total)
    if total < layers * floor:
        raise ValueError(f"{total} tokens for {layers} layers: at least {layers * floor} are needed.")
    return round_to_total(fill(targets, total, floor, ceiling, each), total, ceiling)
