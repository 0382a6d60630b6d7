"""Spherical k-means of the keys of each head: directions, and which of them a key belongs to."""

from __future__ import annotations

import torch
from torch import Tensor

SEGMENT = 8192
"""Tokens that are clustered together: neighbors in the order of positions."""

ROUNDS = 10
"""Rounds of k-means."""

_TILE = 2**20
"""Products of one head's keys with directions that are computed at a time."""

_TIE = 1e-5
"""Products that differ by less than this, relative to the largest, count as equal."""

_LEAST = 1e-30


def segments(tokens: int) -> int:
    """How many segments so many tokens have.

    Examples:
        >>> segments(0), segments(8192), segments(8193)
        (0, 1, 2)
    """
    return -(-tokens // SEGMENT)


def nearest(keys: Tensor, directions: Tensor, used: Tensor) -> Tensor:
    """The direction that has the largest product with each key; of equal ones, the first.

    Args:
        keys: [B, H, n, D].
        directions: [B, H, C, D].
        used: Which of the directions there are, [B, H, C] bool.

    Returns:
        [B, H, n] int64; 0 in a head without directions.

    Examples:
        >>> nearest(torch.tensor([[[[3.0, 1.0]]]]), torch.eye(2)[None, None], torch.ones(1, 1, 2, dtype=torch.bool))
        tensor([[[0]]])
    """
    count = directions.shape[2]
    across = directions.float().mT
    number = torch.arange(count, device=keys.device)
    step = max(_TILE // max(count, 1), 1)
    found: list[Tensor] = []
    for tile in keys.float().split(step, 2):
        product = (tile @ across).masked_fill(~used[:, :, None], -torch.inf)
        best = product.amax(-1, keepdim=True)
        # Sums of a product over more keys are rounded otherwise, and what is equal must stay so.
        within = product >= best - _TIE * best.abs()
        found.append(torch.where(within, number, count).amin(-1).clamp_max(count - 1))
    # In a head without directions, -inf - inf is NaN, and no direction is within.
    return torch.where(used.any(-1, keepdim=True), torch.cat(found, 2), 0)


def mean_by_cluster(vectors: Tensor, assigned: Tensor, counted: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Means of vectors by cluster.

    Args:
        vectors: [B, H, n, D].
        assigned: The cluster of each, [B, H, n] int64.
        counted: Which vectors count, [B, H, n] bool; others may be undefined.
        clusters: C.

    Returns:
        The means, [B, H, C, D] fp64, 0 for a cluster without a vector; and how many vectors each has, [B, H, C] fp64.
    """
    # In fp64, so that a mean does not depend on the order of its sum.
    kept = vectors.double().masked_fill(~counted[..., None], 0)
    index = assigned[..., None].expand(kept.shape)
    total = kept.new_zeros(*kept.shape[:2], clusters, kept.shape[-1]).scatter_add(2, index, kept)
    number = kept.new_zeros(*kept.shape[:2], clusters).scatter_add(2, assigned, counted.double())
    return total / number.clamp_min(1)[..., None], number


def k_means(keys: Tensor, tokens: Tensor, clusters: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Find the directions of clusters of keys, from evenly spaced keys on.

    Args:
        keys: The keys of a segment, in the order of positions, [B, H, n, D]; those behind `tokens` are undefined.
        tokens: How many there are in each head, [B, H] int64.
        clusters: How many clusters each head gets, at most `tokens`, [B, H] int64.
        most: C.

    Returns:
        Directions of length 1, [B, H, C, D] fp32, and which of them there are, [B, H, C] bool.
    """
    number = torch.arange(most, device=keys.device)
    used = number < clusters[..., None]
    start = ((2 * number + 1) * tokens[..., None]).div(2 * clusters[..., None].clamp_min(1), rounding_mode="floor")
    start = start.minimum(tokens[..., None] - 1).clamp_min(0)
    counted = torch.arange(keys.shape[2], device=keys.device) < tokens[..., None]
    keys = keys.float().masked_fill(~counted[..., None], 0)
    directions = unit(keys.gather(2, start[..., None].expand(*start.shape, keys.shape[-1])))
    for _ in range(ROUNDS):
        means, held = mean_by_cluster(keys, nearest(keys, directions, used), counted, most)
        # A cluster that lost all of its keys stays where it was.
        directions = torch.where(held[..., None] > 0, unit(means).float(), directions)
    return directions, used


def unit(vectors: Tensor) -> Tensor:
    """Vectors [..., D] of length 1; those of zeros stay so."""
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp_min(_LEAST)
