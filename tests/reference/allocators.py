"""How many tokens each layer may keep, for one row, in exact fractions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, pairwise

from .exact import Number, exact, floor_share

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


def _in_proportion(targets: list[Fraction], fixed: dict[int, Fraction], total: int) -> dict[int, Fraction]:
    """What is not fixed, shared among the other layers in proportion to their targets."""
    free = [i for i in range(len(targets)) if i not in fixed]
    left = total - sum(fixed.values())
    weight = sum(targets[i] for i in free)
    return {i: left * targets[i] / weight if weight else Fraction(left) / len(free) for i in free}


def fill(targets: Sequence[Number], total: int, floor: int, ceiling: int) -> list[Fraction]:
    """The one x_i = clamp(factor * t_i, floor, ceiling) whose sum is `total`."""
    goals = [exact(t) for t in targets]
    fixed: dict[int, Fraction] = {}
    while len(fixed) < len(goals):
        wish = _in_proportion(goals, fixed, total)
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


def waterfill(targets: Sequence[Number], total: int, floor: int, ceiling: int) -> list[int]:
    """Whole budgets that sum to `total`, as near to the targets as floor and ceiling allow."""
    layers = len(targets)
    if total >= layers * ceiling:
        return round_to_total([Fraction(total, layers)] * layers, total)
    if total < layers * floor:
        raise ValueError(f"{total} tokens for {layers} layers: at least {layers * floor} are needed.")
    return round_to_total(fill(targets, total, floor, ceiling), total, ceiling)


def uniform_targets(total: int, layers: int) -> list[Fraction]:
    """The same for every layer."""
    return [Fraction(total, layers)] * layers


def pyramid_targets(total: int, layers: int, beta: Number = 20) -> list[Fraction]:
    """A straight line from the first layer down to the last."""
    average = Fraction(total, layers)
    least = average / exact(beta)
    most = 2 * average - least
    if layers == 1:
        return [average]
    return [most - i * (most - least) / (layers - 1) for i in range(layers)]


def squeeze_targets(metrics: Sequence[float], total: int, share: Number = 0.4, groups: int = 3) -> list[Fraction]:
    """`share` of an even split for the layers of highest cosine, the rest evenly for the others."""
    layers = len(metrics)
    average = Fraction(total, layers)
    top = top_group(metrics, groups)
    if not top or len(top) == layers:
        return [average] * layers
    less = exact(share) * average
    more = (total - less * len(top)) / (layers - len(top))
    return [less if i in top else more for i in range(layers)]


def top_group(metrics: Sequence[float], groups: int = 3) -> set[int]:
    """Layers in the highest of `groups` clusters; empty where there is nothing to tell apart."""
    order = sorted(range(len(metrics)), key=lambda i: (metrics[i], i))
    values = [Fraction(metrics[i]) for i in order]
    distinct = 1 + sum(b - a > Fraction(1, 10**6) for a, b in pairwise(values))
    if len(values) < 3 or distinct < groups:
        return set()
    cut = min(partitions(values, groups))[1]
    return set(order[len(order) + cut :])


def partitions(values: list[Fraction], groups: int) -> list[tuple[Fraction, int]]:
    """Cost of every contiguous partition of sorted values, with minus the size of its top group."""
    found = []
    for cuts in combinations(range(1, len(values)), groups - 1):
        bounds = [0, *cuts, len(values)]
        parts = [values[a:b] for a, b in pairwise(bounds)]
        found.append((sum((_spread(part) for part in parts), Fraction(0)), -len(parts[-1])))
    return found


def _spread(part: list[Fraction]) -> Fraction:
    mean = sum(part, Fraction(0)) / len(part)
    return sum(((x - mean) ** 2 for x in part), Fraction(0))


def uniform(total: int, layers: int, floor: int, ceiling: int) -> list[int]:
    """Whole budgets, even."""
    return waterfill(uniform_targets(total, layers), total, floor, ceiling)


def pyramid(total: int, layers: int, floor: int, ceiling: int, beta: Number = 20) -> list[int]:
    """Whole budgets that fall from the first layer to the last."""
    return waterfill(pyramid_targets(total, layers, beta), total, floor, ceiling)


def squeeze(
    metrics: Sequence[float], total: int, floor: int, ceiling: int, share: Number = 0.4, groups: int = 3
) -> list[int]:
    """Whole budgets, small where attention hardly changes its input."""
    return waterfill(squeeze_targets(metrics, total, share, groups), total, floor, ceiling)
