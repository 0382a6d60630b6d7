"""Ranks of layers by trying every division, and the latent vectors of several heads number by number."""

from __future__ import annotations

import itertools
import math

Shares = list[list[float]]
"""The share of its energy that each side has in each direction."""


def divisions(sides: int, directions: int, total: int) -> list[tuple[int, ...]]:
    """Every way to give `total` directions to sides, at least one and at most `directions` each."""
    every = itertools.product(range(1, directions + 1), repeat=sides)
    return [ranks for ranks in every if sum(ranks) == total]


def left_out(shares: Shares, ranks: tuple[int, ...]) -> float:
    """The sum of the shares that no direction keeps."""
    return math.fsum(x for row, rank in zip(shares, ranks, strict=True) for x in row[rank:])


def kept(shares: Shares, ranks: tuple[int, ...]) -> list[float]:
    """The share that each side keeps of which a direction is left out, the least first."""
    sides = zip(shares, ranks, strict=True)
    return sorted(math.fsum(row[:rank]) for row, rank in sides if rank < len(row))


def least_energy(shares: Shares, total: int) -> float:
    """The least sum of shares that are left out, of all divisions."""
    return min(left_out(shares, ranks) for ranks in divisions(len(shares), len(shares[0]), total))


def largest_threshold(shares: Shares, total: int) -> float:
    """The largest share that every side can keep, or all of itself; infinite if all keep all."""
    found = (kept(shares, ranks) for ranks in divisions(len(shares), len(shares[0]), total))
    return max(sides[0] if sides else math.inf for sides in found)


def proportional(weights: list[float], total: int, most: int) -> list[float]:
    """Fractional ranks in proportion to weights: what is above `most` or below one is divided again over the others."""
    fixed: dict[int, float] = {}
    while True:
        free = [n for n in range(len(weights)) if n not in fixed]
        rest = total - sum(fixed.values())
        weight = sum(weights[n] for n in free)
        ranks = {n: rest * weights[n] / weight if weight else rest / len(free) for n in free}
        over = sum(max(rank - most, 0) for rank in ranks.values())
        under = sum(max(1 - rank, 0) for rank in ranks.values())
        out = {n: float(most) for n in free if ranks[n] > most} if over >= under else {}
        out = out or {n: 1.0 for n in free if ranks[n] < 1}
        if not out:
            return [fixed.get(n, ranks.get(n, 0.0)) for n in range(len(weights))]
        fixed |= out


def joint_latents(
    vectors: list[list[float]], means: list[list[float]], directions: list[list[float]]
) -> tuple[list[float], list[list[float]]]:
    """The coordinates of the vectors of a group of heads as one long vector, and what each head reads of them.

    Args:
        vectors: The vector of each head.
        means: Its mean.
        directions: Orthonormal directions of the long vector.
    """
    long = [x - m for vector, mean in zip(vectors, means, strict=True) for x, m in zip(vector, mean, strict=True)]
    coordinates = [math.fsum(x * u for x, u in zip(long, direction, strict=True)) for direction in directions]
    width = len(vectors[0])
    read: list[list[float]] = []
    for head, mean in enumerate(means):
        places = range(head * width, (head + 1) * width)
        sums = [math.fsum(c * u[at] for c, u in zip(coordinates, directions, strict=True)) for at in places]
        read.append([m + x for m, x in zip(mean, sums, strict=True)])
    return coordinates, read
