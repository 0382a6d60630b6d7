"""Outliers of a vector that are stored in full: a fixed number of them, so that shapes do not depend on data."""

from __future__ import annotations

import torch
from torch import Tensor

_ABSENT = 1e38
"""Stands for absent elements. It exceeds every number of fp16, so that absent elements are selected last. It is
finite, so that they are still selected before an element that was selected already, which is infinite."""


def outliers_per_side(fraction: float, length: int) -> int:
    """The number of largest elements that are kept, and of smallest ones, if `fraction` of `length` are kept in all.

    >>> outliers_per_side(0.02, 128), outliers_per_side(0.001, 128), outliers_per_side(0, 128)
    (1, 1, 0)
    """
    return max(1, round(fraction / 2 * length)) if fraction else 0


def index_dtype(length: int) -> torch.dtype:
    """The smallest dtype for indices into a vector of `length` elements."""
    return torch.uint8 if length <= 256 else torch.int16


def largest(x: Tensor, count: int, dim: int = -1) -> Tensor:
    """Indices of the `count` largest elements along `dim`, int64, in descending order; ties go to the lower index.

    >>> largest(torch.tensor([3.0, 7.0, 7.0, 1.0]), 2).tolist()
    [1, 2]
    """
    # `topk` does not define which of equal elements it returns, and the count is small.
    indices: list[Tensor] = []
    for _ in range(count):
        index = x.argmax(dim, keepdim=True)
        x = x.scatter(dim, index, -torch.inf)
        indices.append(index)
    if not indices:
        return x.narrow(dim, 0, 0).long()
    return torch.cat(indices, dim)


def extremes(x: Tensor, count: int, dim: int, present: Tensor | None = None) -> Tensor:
    """Indices of the `count` largest and then of the `count` smallest other elements along `dim`, int64, all distinct.

    Args:
        x: Numbers inside the range of fp16.
        count: The number of elements on each side; twice that is at most the length.
        dim: The dimension.
        present: Which elements exist, in the shape of `x`; others are selected only if these do not suffice.

    >>> extremes(torch.tensor([3.0, 7.0, 5.0, 1.0]), 1, -1).tolist()
    [1, 3]
    """
    high = largest(x if present is None else x.masked_fill(~present, -_ABSENT), count, dim)
    negated = -x if present is None else (-x).masked_fill(~present, -_ABSENT)
    return torch.cat([high, largest(negated.scatter(dim, high, -torch.inf), count, dim)], dim)


def bounds(x: Tensor, kept: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of the elements in `kept` along `dim`, which has one element then; inf and -inf for none.

    >>> bounds(torch.tensor([3.0, 7.0, 5.0]), torch.tensor([True, False, True]), 0)
    (tensor([3.]), tensor([5.]))
    """
    left_out = ~kept
    least = x.masked_fill(left_out, torch.inf).amin(dim, keepdim=True)
    return least, x.masked_fill(left_out, -torch.inf).amax(dim, keepdim=True)


def fill(x: Tensor, kept: Tensor, dim: int) -> Tensor:
    """Replace the elements outside `kept` by the mean of the kept ones along `dim`; by zero if none is kept."""
    mean = x.masked_fill(~kept, 0).sum(dim, keepdim=True) / kept.sum(dim, keepdim=True).clamp(min=1)
    least, most = bounds(x, kept, dim)
    # Rounding can put the mean outside the range of the kept elements, which would widen the range to quantize.
    mean = torch.minimum(torch.maximum(mean, least), most)
    return torch.where(kept, x, mean.masked_fill(least > most, 0))
