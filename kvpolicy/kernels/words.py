"""Codes as compiled loops read them: four bytes at a time, as one integer, where the codes allow it.

With AVX2, inductor (torch 2.13) converts bytes one by one, which takes most of the time of a loop; it shifts, masks and
converts integers of four bytes as fast as it multiplies. On a GPU, bytes are read: words took 1.3 times as long there.

The codes at one place of the words are not those of neighboring channels. So queries are brought into the order of the
places before the loop, and sums back into the order of channels after it.
"""

from __future__ import annotations

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


MOST_SUMMED = 8
"""The most places of a word with which sums over slots are faster: each place of each query head has a sum."""


class Place(NamedTuple):
    """Codes of as many channels as there are words, or bytes.

    Attributes:
        codes: [..., W] uint8 or int32.
        channels: Their channels: neighboring ones, or every fourth.
    """

    codes: Tensor
    channels: range


def as_words(codes: Tensor, bits: int, size: int = BYTES, most_places: int = 8 * BYTES) -> Tensor:
    """Codes as words if these are read faster, [..., D' / 4] int32, else the codes as they are.

    Args:
        codes: The output of `kvpolicy.kernels.packing.pack`, [..., D'] uint8.
        bits: Bits per code.
        size: Channels that share a scale.
        most_places: The most places of a word with which words are read faster.
    """
    if codes.device.type != "cpu":
        return codes
    words = codes.shape[-1] // BYTES
    is_split = 8 % bits == 0 and codes.shape[-1] % BYTES == size % BYTES == 0 and 8 // bits * BYTES <= most_places
    is_aligned = codes.stride(-1) == 1 and all(stride % BYTES == 0 for stride in codes.stride()[:-1])
    return codes.view(torch.int32) if is_split and is_aligned and words and words % VECTOR == 0 else codes


def split(codes: Tensor, bits: int) -> list[Place]:
    """The codes at each place of words or bytes, whose channels are every channel once.

    Args:
        codes: The output of `as_words`.
        bits: Bits per code.
    """
    width = codes.shape[-1]
    if codes.dtype == torch.uint8:
        parts = unpack_places(codes, bits)
        size = parts[0].shape[-1]
        return [Place(part, range(n * size, (n + 1) * size)) for n, part in enumerate(parts)]
    mask = 2**bits - 1
    return [
        Place((codes >> (8 * byte + shift)) & mask, range(first + byte, first + BYTES * width, BYTES))
        for shift in range(0, 8, bits)
        for first in [shift // bits * BYTES * width]
        for byte in range(BYTES)
    ]


def in_order_of_places(t: Tensor, codes: Tensor) -> Tensor:
    """Numbers of channels [..., D], those of each place of the codes next to each other; see `split`."""
    if codes.dtype == torch.uint8:
        return t
    return in_memory(t.unflatten(-1, (-1, codes.shape[-1], BYTES)).transpose(-1, -2).flatten(-3))


def in_order_of_channels(t: Tensor, codes: Tensor) -> Tensor:
    """What `in_order_of_places` reordered, in the order of channels again, [..., D]."""
    if codes.dtype == torch.uint8:
        return t
    return t.unflatten(-1, (-1, BYTES, codes.shape[-1])).transpose(-1, -2).flatten(-3)
