"""Small codes in whole bytes, and rounding that a compiler cannot skip."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def packed_width(width: int, bits: int) -> int:
    """Bytes that `width` codes of `bits` bits take.

    >>> packed_width(128, 3), packed_width(5, 4)
    (48, 3)
    """
    return sum(-(-width * part // 8) for part in _parts(bits))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Put codes of `bits` bits into bytes.

    A width that divides 8 is packed as it is: byte j holds codes j, j + D', j + 2D'..., the first in the low bits,
    where D' = D * bits / 8. In this order unpacking is a concatenation; neighbours in one byte would have to be
    interleaved, which is slow. Any other width is a sum of such (3 = 2 + 1, 12 = 8 + 4), whose parts of every code,
    the low bits first, are packed one behind the other.

    Args:
        codes: [..., D], of an integer type, each in [0, 2**bits).
        bits: 1 to 16.

    Returns:
        [..., packed_width(D, bits)] uint8.

    >>> pack(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), 4).tolist()  # 1 + 16 * 3, 2 + 16 * 4
    [49, 66]
    """
    packed: list[Tensor] = []
    shift = 0
    for part in _parts(bits):
        some = codes if part == bits else (codes >> shift) & (2**part - 1)
        packed.append(_pack_even(some.to(torch.uint8), part))
        shift += part
    return packed[0] if len(packed) == 1 else torch.cat(packed, -1)


def unpack(packed: Tensor, bits: int, width: int | None = None) -> Tensor:
    """Undo `pack`.

    Args:
        packed: What `pack` made, [..., bytes] uint8.
        bits: 1 to 16.
        width: How many codes there are; needed where they do not fill their bytes, or `bits` does not divide 8.

    Returns:
        [..., width], uint8 up to 8 bits and int32 above.

    >>> unpack(torch.tensor([49, 66], dtype=torch.uint8), 4).tolist()
    [1, 2, 3, 4]
    """
    if width is None:
        assert 8 % bits == 0, "the number of codes must be told"
        width = packed.shape[-1] * 8 // bits
    codes, start, shift = None, 0, 0
    for part in _parts(bits):
        size = packed_width(width, part)
        some = _unpack_even(packed[..., start : start + size], part)[..., :width]
        some = some if bits <= 8 else some.int()
        codes = some if codes is None else codes | (some << shift)
        start, shift = start + size, shift + part
    assert codes is not None
    return codes


def _parts(bits: int) -> list[int]:
    """Widths that divide 8 and sum to `bits`, the largest first."""
    assert 1 <= bits <= 16, "codes have 1 to 16 bits"
    return [8] * (bits // 8) + [part for part in (4, 2, 1) if bits % 8 & part]


def _pack_even(codes: Tensor, bits: int) -> Tensor:
    per_byte = 8 // bits
    if codes.shape[-1] % per_byte:
        codes = F.pad(codes, (0, -codes.shape[-1] % per_byte))
    low, *higher = codes.chunk(per_byte, -1)
    for place, part in enumerate(higher, 1):
        low = low | (part << (bits * place))
    return low


def _unpack_even(packed: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return packed
    mask, last = 2**bits - 1, 8 - bits
    middle = [(packed >> shift) & mask for shift in range(bits, last, bits)]
    return torch.cat([packed & mask, *middle, packed >> last], -1)


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
