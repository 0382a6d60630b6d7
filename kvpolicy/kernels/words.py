"""Codes as compiled loops read them: four bytes at a time, as one number, where the codes allow it.

With AVX2, inductor (torch 2.13) loads vectors of bytes and of integers by way of the stack, in two halves that the load
behind them has to wait for, which takes most of the time of a loop. It loads vectors of fp32 at once. So words of codes
are loaded as if they were fp32, and their bits are taken as integers. On a GPU, bytes are read: integers of four bytes
took longer there.

The codes at one place of the words are not those of neighboring channels. So queries are brought into the order of the
places before the loop, and sums back into the order of channels after it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.kernels.in_memory import in_memory
from kvpolicy.kernels.packing import unpack_places

HAS_WIDE_VECTORS = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
"""Whether vectors have 64 bytes, and bytes are converted as fast as they are multiplied."""

VECTOR = 16 if HAS_WIDE_VECTORS else 8
"""Words in a vector of the CPU."""

BYTES = 4
"""Bytes of a word."""


class Place(NamedTuple):
    """Codes of as many channels as there are words, or bytes.

    Attributes:
        codes: [..., W] uint8 or int32, not packed.
        channels: Their channels: neighboring ones, or every fourth.
    """

    codes: Tensor
    channels: range


def as_words(codes: Tensor, bits: int, size: int | None = None, sums_slots: bool = False) -> Tensor:
    """Codes as words if these are read faster, [..., D' / 4] fp32, else the codes as they are.

    Args:
        codes: The output of `kvpolicy.kernels.packing.pack`, [..., D'] uint8.
        bits: Bits per code.
        size: Channels that share a scale, if only some do.
        sums_slots: Whether slots are summed and not channels, so that the words of a slot must fill vectors.
    """
    if codes.device.type != "cpu":
        return codes
    words = constant(codes.shape[-1]) // BYTES
    least = VECTOR if sums_slots or HAS_WIDE_VECTORS else 1
    is_split = 8 % bits == 0 and codes.shape[-1] % BYTES == 0
    if size is not None:
        # Loops are over the words of one group. A wide vector needs as many, and bytes have four times as many.
        is_split &= size % BYTES == 0 and not (HAS_WIDE_VECTORS and math.gcd(words, constant(size) // BYTES) % VECTOR)
    is_aligned = codes.stride(-1) == 1 and all(stride % BYTES == 0 for stride in codes.stride()[:-1])
    return codes.view(torch.float32) if is_split and is_aligned and words and words % least == 0 else codes


def constant(size: int) -> int:
    """A size of which loops and groups are made, as a number.

    In a compiled step, a size that has changed since the first compilation is a symbol, and neither `math.gcd` nor a
    set takes it. Listing a range turns it into the number for which this step is compiled.

    Examples:
        >>> constant(12)
        12
    """
    return len([*range(size)])


def split(codes: Tensor, bits: int) -> list[Place]:
    """The codes at each place of words or bytes, whose channels are every channel once.

    Args:
        codes: The output of `as_words`.
        bits: Bits per code.
    """
    if codes.dtype == torch.uint8:
        parts = unpack_places(codes, bits)
        size = constant(parts[0].shape[-1])
        return [Place(part, range(n * size, (n + 1) * size)) for n, part in enumerate(parts)]
    width = constant(codes.shape[-1])
    mask = 2**bits - 1
    codes = codes.view(torch.int32)
    return [
        Place((codes >> (8 * byte + shift)) & mask, range(first + byte, first + BYTES * width, BYTES))
        for shift in range(0, 8, bits)
        for first in [shift // bits * BYTES * width]
        for byte in range(BYTES)
    ]


def in_order_of_places(t: Tensor, words: Tensor) -> Tensor:
    """Numbers of channels [..., D], those of each place of words next to each other; see `split`.

    Args:
        t: The numbers.
        words: Words, which are fp32, or what was not made into words, so that the order stays.
    """
    if words.dtype != torch.float32:
        return t
    return in_memory(t.unflatten(-1, (-1, words.shape[-1], BYTES)).transpose(-1, -2).flatten(-3))


def in_order_of_channels(t: Tensor, words: Tensor) -> Tensor:
    """Numbers that `in_order_of_places` reordered, in the order of channels again, [..., D]."""
    if words.dtype != torch.float32:
        return t
    return t.unflatten(-1, (-1, BYTES, words.shape[-1])).transpose(-1, -2).flatten(-3)
