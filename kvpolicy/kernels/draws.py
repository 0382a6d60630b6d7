"""Random numbers of places: the same for a place on every device, in every batch and in every tile."""

from __future__ import annotations

from torch import Tensor

_BITS = 0xFFFFFFFF
"""All numbers stay below 2**32, and factors below 2**31, so that no product leaves int64."""

_MIX = 0x45D9F3B
_STEP = 0x1E3779B1


def mixed(key: Tensor | int, number: Tensor) -> Tensor:
    """Integers in [0, 2**32) that look random, of pairs of integers; pairs of such a key and a number make longer ones.

    Args:
        key: An integer, or a result of this function, int64, that broadcasts against `number`.
        number: int64, at least 0.

    Examples:
        >>> import torch
        >>> rows = mixed(7, torch.arange(2))
        >>> mixed(rows[:, None], torch.arange(3)).shape
        torch.Size([2, 3])
    """
    x = (number * _STEP + key) & _BITS
    x = ((x ^ (x >> 16)) * _MIX) & _BITS
    x = ((x ^ (x >> 16)) * _MIX) & _BITS
    return x ^ (x >> 16)


def exponentials(key: Tensor, number: Tensor) -> Tensor:
    """Draws from the exponential distribution of mean 1, fp32, of pairs of integers; see `mixed`.

    Minus their logarithm has the Gumbel distribution.
    """
    # Of 23 bits: one more than a half of the last would be rounded up to 1, whose logarithm is 0.
    uniform = ((mixed(key, number) >> 9).float() + 0.5) * 2.0**-23
    return -uniform.log()
