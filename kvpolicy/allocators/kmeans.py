"""Exact one-dimensional k-means, without a seed."""

from __future__ import annotations

import torch
from torch import Tensor

_RELATIVE_TIE = 1e-9
"""Costs that differ by less than this, relative to the cost of a single group, count as equal."""

_ROUNDING = 1e-24
"""So do costs that differ by less than this, relative to the squared values: about the rounding error of fp64."""


def top_group(values: Tensor, groups: int) -> Tensor:
    """Find the group of the highest values in the optimal division of `values` into `groups`.

    Groups of numbers that minimize the sum of squares within groups are contiguous in sorted order, so the optimum is
    found by dynamic programming. Among equally good divisions, the one with the largest top group is returned. Equal
    values stay together, unless there are fewer distinct ones than groups.

    Args:
        values: [L].
        groups: The number of groups, at least 2 and at most L.

    Returns:
        Whether each value is in the top group, [L] bool.

    >>> top_group(torch.tensor([0.1, 0.9, 0.5, 0.85]), 3).tolist()
    [False, True, False, True]
    """
    ranked, order = values.double().sort()
    cost = _costs(ranked)  # [L + 1, L + 1]
    # best[j] is the lowest cost of the first j values, here in one group, then in one more with each round: the last
    # group of the first j values starts at some i, and the first i values are divided optimally.
    best = cost[0]
    for _ in range(groups - 2):
        best = (best[:, None] + cost).amin(0)
    with_top_from = best + cost[:, -1]  # the cost if the top group starts at i
    tolerance = _RELATIVE_TIE * cost[0, -1] + _ROUNDING * ranked.square().amax()
    # The smallest start within the tolerance: without it, rounding would decide between equally good divisions.
    start = int((with_top_from <= with_top_from.amin() + tolerance).int().argmax())
    # Within the tolerance, it may start between equal values, which stay together.
    same = (ranked == ranked[start]).nonzero().flatten()
    if len(ranked.unique()) >= groups:
        start = int(same[0]) or int(same[-1]) + 1
    return torch.zeros_like(values, dtype=torch.bool).index_fill(0, order[start:], True)


def _costs(ranked: Tensor) -> Tensor:
    """The sum of squares within ranked[i:j] for every i < j, [L + 1, L + 1]; infinite if the group is empty."""
    edge = torch.arange(len(ranked) + 1, device=ranked.device)
    index = edge[:-1]
    inside = (index >= edge[:, None, None]) & (index < edge[:, None])  # [i, j, L]
    count = inside.sum(-1)
    mean = (inside * ranked).sum(-1) / count.clamp(min=1)
    # About the mean of each group, because differences of prefix sums would cancel. L is small.
    squares = (inside * (ranked - mean[..., None]) ** 2).sum(-1)
    return squares.masked_fill(count == 0, torch.inf)
