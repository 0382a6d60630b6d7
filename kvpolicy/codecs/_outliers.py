"""Numbers of a vector that are kept as they are: a fixed count, so that shapes do not depend on data."""

from __future__ import annotations

import torch
from torch import Tensor

_ABSENT = 1e38
"""Further out than any number of fp16, but not infinite: an absent number is taken last, a taken one never again."""


def each_side(share: float, length: int) -> int:
    """How many of the largest, and of the smallest, numbers are kept where `weights` of `length` are kept in all.

    >>> each_side(0.02, 128), each_side(0.001, 128), each_side(0, 128)
    (1, 1, 0)
    """
    return max(1, round(share / 2 * length)) if share else 0


def index_dtype(length: int) -> torch.dtype:
    """The smallest type that holds the places of a vector of `length` numbers."""
    return torch.uint8 if length <= 256 else torch.int16


def largest(x: Tensor, count: int, dim: int = -1) -> Tensor:
    """Where the `count` largest numbers along `dim` are, the largest first; ties: the earlier one. Int64.

    >>> largest(torch.tensor([3.0, 7.0, 7.0, 1.0]), 2).tolist()
    [1, 2]
    """
    places: list[Tensor] = []
    for _ in range(count):
        place = x.argmax(dim, keepdim=True)
        x = x.scatter(dim, place, -torch.inf)
        places.append(place)
    if not places:
        return x.narrow(dim, 0, 0).long()
    return torch.cat(places, dim)


def extremes(x: Tensor, count: int, dim: int, there: Tensor | None = None) -> Tensor:
    """Where the `count` largest and then the `count` smallest other numbers along `dim` are, all distinct. Int64.

    Args:
        x: Numbers inside the range of fp16.
        count: How many on each side; twice that is at most the length.
        dim: Along which dimension.
        there: Which numbers there are, as wide as `x`; others are taken only where those do not suffice.

    >>> extremes(torch.tensor([3.0, 7.0, 5.0, 1.0]), 1, -1).tolist()
    [1, 3]
    """
    high = largest(x if there is None else x.masked_fill(~there, -_ABSENT), count, dim)
    low = -x if there is None else (-x).masked_fill(~there, -_ABSENT)
    return torch.cat([high, largest(low.scatter(dim, high, -torch.inf), count, dim)], dim)


def fill(x: Tensor, kept: Tensor, dim: int) -> Tensor:
    """Put the mean of a vector's kept numbers in the place of its others; zero where none is kept."""
    mean = x.masked_fill(~kept, 0).sum(dim, keepdim=True) / kept.sum(dim, keepdim=True).clamp(min=1)
    least = x.masked_fill(~kept, torch.inf).amin(dim, keepdim=True)
    most = x.masked_fill(~kept, -torch.inf).amax(dim, keepdim=True)
    mean = torch.minimum(torch.maximum(mean, least), most)  # so that rounding does not widen the range
    return torch.where(kept, x, mean.masked_fill(least > most, 0))
