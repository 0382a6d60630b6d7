"""Bits of principal components: the groups, and the bits of each, with the least error that fits a number of bits."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.hf.kvtc.quantizer import Group, dequantize, quantize

SIZES = (1, 16, 64, 256, 1024)
"""How many components a group may have."""

BITS = (2, 4, 8)
"""Bits that a code may have."""

STEP = 16
"""Larger groups begin at multiples of it: there are too many others to measure them all."""

Choice = tuple[Group, Tensor]
"""A group, and the error of the components from each one on that are quantized as such a group."""


def measure_errors(latents: Tensor, sizes: Sequence[int] = SIZES, bits: Sequence[int] = BITS) -> list[Choice]:
    """The error of every group that may be, measured on components of tokens.

    Args:
        latents: [n, r].
        sizes: How many components a group may have.
        bits: Bits that a code may have.

    Returns:
        Groups of at most r components. The errors of a group, [r - size + 1] fp64 on the CPU, are sums of squares over
        the tokens and over the components from each one on; infinite where no such group begins.
    """
    width = latents.shape[1]
    latents = latents.float()
    found: list[Choice] = []
    for group in (Group(size, each) for size in sizes for each in bits if size <= width):
        starts = range(0, width - group.size + 1, STEP if group.size > STEP else 1)
        lost = torch.full((width - group.size + 1,), math.inf, dtype=torch.float64, device="cpu")
        lost[:: starts.step] = torch.stack(
            [_error(latents[:, start : start + group.size], group.bits) for start in starts]
        ).cpu()
        found.append((group, lost))
    return found


def _error(x: Tensor, bits: int) -> Tensor:
    return (x - dequantize(quantize(x, bits))).square().sum(dtype=torch.float64)


def allocate(choices: Sequence[Choice], energy: Tensor, budget: int) -> tuple[Group, ...]:
    """Divide a number of bits among components, with the least sum of squared errors.

    Every way to cut the components into groups and gaps is considered. A component in a gap is dropped: it takes no
    bits, and all of its energy is lost.

    Args:
        choices: The groups that may be, as of `measure_errors`.
        energy: What is lost of each component that is dropped, [r].
        budget: The most bits of a token, with shifts and scales.

    Returns:
        Groups of the first components; the others are dropped.

    Examples:
        >>> errors = [(Group(1, 2), torch.tensor([1.0, 0.5])), (Group(1, 8), torch.tensor([0.0, 0.0]))]
        >>> allocate(errors, torch.tensor([9.0, 2.0]), 40)
        (Group(size=1, bits=8),)
    """
    kept = [(group, errors.double().tolist()) for group, errors in choices if group.cost <= budget]
    if not kept:
        return ()
    unit = math.gcd(*(group.cost for group, _ in kept))
    units = budget // unit
    lost: list[float] = energy.double().tolist()
    width = len(lost)
    # chosen[i][b]: the last group of the first i components in b units of bits. best[-s][b]: the least error of all but
    # the last s of them; no group is larger than what is kept here.
    chosen = torch.zeros(width + 1, units + 1, dtype=torch.int8, device="cpu")
    best = deque(
        [torch.zeros(units + 1, dtype=torch.float64, device="cpu")], maxlen=max(group.size for group, _ in kept)
    )
    for end in range(1, width + 1):
        least = best[-1] + lost[end - 1]
        for number, (group, errors) in enumerate(kept, 1):
            start = end - group.size
            if start < 0:
                continue
            cost = group.cost // unit
            with_it = best[-group.size][: units + 1 - cost] + errors[start]
            better = with_it < least[cost:]
            least[cost:] = torch.where(better, with_it, least[cost:])
            chosen[end, cost:].masked_fill_(better, number)
        best.append(least)
    return _groups([group for group, _ in kept], chosen, unit)


def _groups(kept: Sequence[Group], chosen: Tensor, unit: int) -> tuple[Group, ...]:
    """The groups that were chosen, from the last component back to the first."""
    found: list[Group] = []
    end = chosen.shape[0] - 1
    left = chosen.shape[1] - 1
    gap = 0
    while end > 0:
        number = int(chosen[end, left])
        if not number:
            gap += 1
            end -= 1
            continue
        group = kept[number - 1]
        # A gap behind the last group is not written down.
        if gap and found:
            found.append(Group(gap, 0))
        gap = 0
        found.append(group)
        end -= group.size
        left -= group.cost // unit
    if gap and found:
        found.append(Group(gap, 0))
    return tuple(reversed(found))
