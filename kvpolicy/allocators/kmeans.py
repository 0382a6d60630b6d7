"""Exact k-means of numbers: the optimum, without a seed."""

from __future__ import annotations

import torch
from torch import Tensor

_TIE = 1e-9  # costs that differ by less, relative to the spread of all values, are equal
_NOISE = 1e-24  # and so are those that differ by less relative to the values' squares: fp64 rounds so


def top_group(values: Tensor, groups: int) -> Tensor:
    """Find the group of the highest values in the best division of `values` into `groups`.

    Groups of numbers that minimise the squares within are contiguous once sorted, so the best division is found
    exactly by dynamic programming. Of divisions equally good, the one with the largest top group wins.

    Args:
        values: Numbers, [L].
        groups: How many groups, at least 2 and at most L.

    Returns:
        Whether each value is in the top group, [L] bool.

    >>> top_group(torch.tensor([0.1, 0.9, 0.5, 0.85]), 3).tolist()
    [False, True, False, True]
    """
    ranked, order = values.double().sort()
    cost = _costs(ranked)  # [L + 1, L + 1]
    best = cost[0]  # of the first j values in one group
    for _ in range(groups - 2):
        best = (best[:, None] + cost).amin(0)
    last = best + cost[:, -1]  # of a top group that starts at i
    slack = _TIE * cost[0, -1] + _NOISE * ranked.square().amax()
    start = int((last <= last.amin() + slack).int().argmax())
    return torch.zeros_like(values, dtype=torch.bool).index_fill(0, order[start:], True)


def _costs(ranked: Tensor) -> Tensor:
    """The squares within ranked[i:j] for every i < j, [L + 1, L + 1]; infinite where there is no such group."""
    edge = torch.arange(len(ranked) + 1, device=ranked.device)
    index = edge[:-1]
    inside = (index >= edge[:, None, None]) & (index < edge[:, None])  # [i, j, L]
    count = inside.sum(-1)
    mean = (inside * ranked).sum(-1) / count.clamp(min=1)
    squares = (inside * (ranked - mean[..., None]) ** 2).sum(-1)  # about the mean: prefix sums would cancel
    return squares.masked_fill(count == 0, torch.inf)
