"""How far logits are from others: the largest difference, in standard deviations of the others."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

RULED_OUT = -1e30
"""Models give less than this to tokens that they rule out."""


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference of logits, in standard deviations of the expected ones; infinite where one is no number.

    >>> round(difference(torch.tensor([0.0, 5.0, 10.0]), torch.tensor([0.0, 5.0, 9.0])), 3)
    0.222
    >>> difference(torch.tensor([0.0, float("nan")]), torch.tensor([0.0, float("nan")]))
    inf
    """
    ruled_out = (found < RULED_OUT) & (expected < RULED_OUT)
    finite = torch.isfinite(found) & torch.isfinite(expected)
    if not bool((finite | ruled_out).all()) or not bool(finite.any()):
        return math.inf
    deviation = expected[finite & ~ruled_out].std().clamp_min(1e-6)
    return float((found - expected)[~ruled_out].abs().max() / deviation)


def largest(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest difference of several logits."""
    return max(difference(one, other) for one, other in zip(found, expected, strict=True))


def until_parted(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    """The largest difference of logits of one generation, until its tokens differ from those of another.

    Args:
        found: Tokens, [1, new], and their logits, [1, new, vocabulary].
        expected: The same of the other one.
    """
    same = (found[0] == expected[0])[0].int().cumprod(0).sum()
    steps = min(int(same) + 1, found[0].shape[1])  # the logits of the first token that differs count
    return difference(found[1][:, :steps], expected[1][:, :steps])
