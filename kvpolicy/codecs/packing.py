"""Small codes in whole bytes, and rounding that a compiler cannot skip."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """Put several codes of `bits` bits into each byte.

    Byte j holds channels j, j + D', j + 2D'..., the first in the low bits, where D' = D * bits / 8. In this order
    unpacking is a concatenation; neighbours in one byte would have to be interleaved, which is slow.

    Args:
        codes: [..., D] uint8, each below 2**bits.
        bits: 2, 4 or 8.

    Returns:
        [..., D * bits / 8] uint8.

    >>> pack(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), 4).tolist()  # 1 + 16 * 3, 2 + 16 * 4
    [49, 66]
    """
    low, *higher = codes.chunk(8 // bits, -1)
    for place, part in enumerate(higher, 1):
        low = low | (part << (bits * place))
    return low


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack`, [..., D] uint8.

    >>> unpack(torch.tensor([49, 66], dtype=torch.uint8), 4).tolist()
    [1, 2, 3, 4]
    """
    if bits == 8:
        return packed
    mask = 2**bits - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)], -1)


def round_to_half(x: Tensor) -> Tensor:
    """Round fp32 to numbers that fp16 has, but stay fp32.

    `x.half().float()` would do, were it not that a compiled kernel skips such a pair of casts, and so would quantize
    with other numbers than it stores.

    Args:
        x: Numbers inside the range of fp16.

    >>> round_to_half(torch.tensor([0.1])).item() == torch.tensor(0.1).half().item()
    True
    """
    raw = x.view(torch.int32)
    normal = ((raw + 0xFFF + ((raw >> 13) & 1)) & ~0x1FFF).view(torch.float32)  # to nearest, ties to even
    return torch.where(x.abs() < 2.0**-14, (x * 2.0**24).round() * 2.0**-24, normal)
