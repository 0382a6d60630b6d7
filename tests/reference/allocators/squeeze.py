"""Less for layers whose attention hardly changes its input."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, pairwise

from ..coding import Config
from ..exact import Number, exact
from ._common import waterfill


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


def squeeze(
    metrics: Sequence[float], total: int, floor: int, ceiling: int, share: Number = 0.4, groups: int = 3
) -> list[int]:
    """Whole budgets, small where attention hardly changes its input."""
    return waterfill(squeeze_targets(metrics, total, share, groups), total, floor, ceiling)


def budgets(
    config: Config, metrics: Sequence[float] | None, total: int, layers: int, floor: int, ceiling: int
) -> list[int]:
    """Whole budgets, small where attention hardly changes its input."""
    assert metrics is not None
    return squeeze(metrics, total, floor, ceiling, config["keep_share"])
