"""One option for each item, so that the costs fit a limit and the losses are small: a multiple-choice knapsack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

UNITS = 4096
"""Parts of the limit in which costs are counted by dynamic programming."""


class Option(NamedTuple):
    """An option for one item.

    Attributes:
        cost: Its cost, counted against the limit, at least 0.
        loss: Its contribution to the sum that is minimized.
    """

    cost: int
    loss: float


def choose(items: Sequence[Sequence[Option]], limit: int) -> list[int] | None:
    """Choose one option for each item.

    Two ways, of which the better one counts: by the lower convex hulls, and by dynamic programming over `UNITS` parts
    of the limit. Both then exchange single options while that saves something.

    Args:
        items: The options of each item.
        limit: The most that the chosen options may cost together.

    Returns:
        The index of the chosen option of each item; None if even the cheapest ones cost more than the limit.

    Examples:
        >>> items = [[Option(1, 4.0), Option(3, 1.0)], [Option(1, 9.0), Option(2, 2.0), Option(4, 0.0)]]
        >>> choose(items, 5), choose(items, 3), choose(items, 1)
        ([1, 1], [0, 1], None)
    """
    if not items:
        return []
    first = _by_hulls(items, limit)
    if first is None:
        return None
    found = [_fill(items, chosen, limit) for chosen in (first, _by_units(items, limit)) if chosen is not None]
    return min(found, key=lambda chosen: _total(items, chosen).loss)


def _total(items: Sequence[Sequence[Option]], chosen: Sequence[int]) -> Option:
    options = [item[index] for item, index in zip(items, chosen, strict=True)]
    return Option(sum(option.cost for option in options), sum(option.loss for option in options))


def _by_units(items: Sequence[Sequence[Option]], limit: int) -> list[int] | None:
    """The optimum for costs that are rounded up to parts of the limit; None if nothing fits then."""
    unit = max(-(-limit // UNITS), 1)
    size = limit // unit + 1
    least = torch.zeros(size, dtype=torch.float64, device="cpu")
    picks: list[Tensor] = []
    for options in items:
        after = torch.full_like(least, torch.inf)
        pick = torch.zeros(size, dtype=torch.int64, device="cpu")
        for index, option in enumerate(options):
            cost = -(-option.cost // unit)
            if cost >= size:
                continue
            losses = least[: size - cost] + option.loss
            better = losses < after[cost:]
            after[cost:][better] = losses[better]
            pick[cost:][better] = index
        picks.append(pick)
        least = after
    at = size - 1
    if not bool(least[at].isfinite()):
        return None
    chosen: list[int] = []
    for options, pick in zip(reversed(items), reversed(picks), strict=True):
        chosen.append(int(pick[at]))
        at -= -(-options[chosen[-1]].cost // unit)
    return chosen[::-1]


def _by_hulls(items: Sequence[Sequence[Option]], limit: int) -> list[int] | None:
    """The steps of all lower convex hulls in the order of the loss that a unit of cost saves.

    Up to the first step that does not fit, that is the optimum of the Lagrangian relaxation.
    """
    hulls = [_hull(options) for options in items]
    chosen = [hull[0] for hull in hulls]
    left = limit - _total(items, chosen).cost
    if left < 0:
        return None
    steps: list[tuple[float, int, int]] = []
    for number, (options, hull) in enumerate(zip(items, hulls, strict=True)):
        for at in range(1, len(hull)):
            steps.append((-_saving(options[hull[at - 1]], options[hull[at]]), number, at))
    closed: set[int] = set()
    # Savings fall along a hull, so that sorting keeps the steps of an item in order; ties go to the earlier item.
    for _, number, at in sorted(steps):
        cost = items[number][hulls[number][at]].cost - items[number][chosen[number]].cost
        # A step that does not fit closes its item: the savings of later steps are counted from where this one ends.
        if number in closed or cost > left:
            closed.add(number)
            continue
        left -= cost
        chosen[number] = hulls[number][at]
    return chosen


def _hull(options: Sequence[Option]) -> list[int]:
    """The options on the lower convex hull from the cheapest to the one of least loss, by their cost."""
    order = sorted(range(len(options)), key=lambda index: (options[index].cost, options[index].loss, index))
    hull: list[int] = []
    for index in order:
        if hull and options[index].loss >= options[hull[-1]].loss:
            continue  # costs no less, and saves nothing
        while len(hull) > 1 and _saving(options[hull[-2]], options[hull[-1]]) <= _saving(
            options[hull[-1]], options[index]
        ):
            hull.pop()
        hull.append(index)
    return hull


def _saving(cheap: Option, dear: Option) -> float:
    """The loss that each further unit of cost saves."""
    return (cheap.loss - dear.loss) / (dear.cost - cheap.cost) if dear.cost > cheap.cost else float("inf")


def _fill(items: Sequence[Sequence[Option]], chosen: Sequence[int], limit: int) -> list[int]:
    """Exchange one option after another while one fits that saves something, the best first."""
    chosen = list(chosen)
    left = limit - _total(items, chosen).cost
    while True:
        best: tuple[float, int, int] | None = None
        for number, options in enumerate(items):
            now = options[chosen[number]]
            for index, option in enumerate(options):
                saved = now.loss - option.loss
                if option.cost - now.cost <= left and saved > 0 and (best is None or saved > best[0]):
                    best = saved, number, index
        if best is None:
            return chosen
        _, number, index = best
        left -= items[number][index].cost - items[number][chosen[number]].cost
        chosen[number] = index
