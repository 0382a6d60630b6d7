"""The largest of many numbers, of which ties go to the first in another order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_FEWEST = 8192
"""Of fewer numbers, `topk` takes no longer than finding them in blocks."""

_LAST = torch.iinfo(torch.int32).max


def largest(numbers: Tensor, order: Tensor, count: int) -> Tensor:
    """Find the largest numbers; of equal ones, those that come first in `order`.

    On a CPU, most of the time of `topk` is for moving numbers that are not among the largest. So blocks of numbers are
    ranked by their largest one first: the largest `count` numbers lie in `count` blocks. The rest is not looked at.

    Args:
        numbers: [..., N] fp32, without NaN.
        order: Place of each number, [..., N] int32 or int64, from 0 to 2^31 - 1; where both are equal, any of them is
            found.
        count: How many are found, at most N.

    Returns:
        Where they are, [..., count] int64, the largest first.

    Examples:
        >>> largest(torch.tensor([1.0, 3, 2, 3]), torch.tensor([0, 3, 2, 1], dtype=torch.int32), 3)
        tensor([3, 1, 2])
    """
    size = block_size(numbers.shape[-1], count) if numbers.device.type == "cpu" else 1
    if size == 1:
        return _ranks(numbers, order).topk(count, -1, largest=False).indices
    places = _candidates(numbers, order, count, size)
    best = _ranks(numbers.gather(-1, places), order.gather(-1, places)).topk(count, -1, largest=False).indices
    return places.gather(-1, best)


def block_size(total: int, count: int) -> int:
    """How many numbers to put into a block; 1 if blocks are not worth it.

    Examples:
        >>> block_size(65_536, 3277), block_size(65_536, 256), block_size(65_536, 40_000), block_size(1000, 10)
        (4, 16, 1, 1)
    """
    if total < _FEWEST or count < 1:
        return 1
    # `total / size` blocks are ranked, and then `count * size` numbers: fewest in all where both are as many.
    size = 2 ** round(math.log2(total / count) / 2)
    return size if count <= total // size else 1


def _candidates(numbers: Tensor, order: Tensor, count: int, size: int) -> Tensor:
    """Where the numbers of the best `count` blocks of `size` are, and those that are in no block."""
    total = numbers.shape[-1]
    blocks = total // size
    ends = blocks * size
    # Neighbors are in different blocks, so that a block's maximum is one of whole vectors.
    blocked = numbers[..., :ends].unflatten(-1, (size, blocks))
    maxima = blocked.amax(-2)
    # Not `where`, which is not vectorized in eager mode: the processor would guess which numbers are the largest.
    behind = (blocked < maxima[..., None, :]).int() * _LAST
    first = order[..., :ends].unflatten(-1, (size, blocks)).maximum(behind).amin(-2)
    best = _ranks(maxima, first).topk(count, -1, largest=False, sorted=False).indices
    starts = torch.arange(0, ends, blocks, device=numbers.device)
    places = (best[..., None, :] + starts[:, None]).flatten(-2)
    if ends == total:
        return places
    rest = torch.arange(ends, total, device=numbers.device)
    return torch.cat([places, rest.expand(*places.shape[:-1], -1)], -1)


def _ranks(numbers: Tensor, order: Tensor) -> Tensor:
    """Integers that are ordered against the numbers, and where these are equal, like `order`; [..., N] int64."""
    bits = (numbers + 0.0).view(torch.int32)  # adding 0.0 turns -0.0 into 0.0
    # Numbers of fp32 are ordered like their bits, but negative ones the other way round.
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    # `topk` leaves open which of equal numbers it returns, so the order takes the low bits.
    # A number has 32 bits and a place 31, so that both fit into int64 side by side.
    wide = rank if order.dtype == torch.int64 else rank.long()
    return torch.sub(order, wide, alpha=1 << 31)
