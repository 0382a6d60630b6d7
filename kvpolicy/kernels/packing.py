"""Packing of small codes into bytes, and a rounding to fp16 that a compiler cannot remove."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PARTS = {bits: [8] * (bits // 8) + [part for part in (4, 2, 1) if bits % 8 & part] for bits in range(1, 17)}
"""Widths that divide 8 and sum to each number of bits, the largest first."""


def packed_width(width: int, bits: int) -> int:
    """The number of bytes that `width` codes of `bits` bits take.

    >>> packed_width(128, 3), packed_width(5, 4)
    (48, 3)
    """
    return sum(-(-width * part // 8) for part in PARTS[bits])


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of `bits` bits into bytes.

    If `bits` divides 8, byte j holds the codes j, j + D', j + 2D' and so on, the first one in its low bits, where
    D' = D * bits / 8. In this order unpacking is a concatenation; if a byte held neighboring codes, unpacking would
    have to interleave them, which is slow. Any other width is a sum of widths that divide 8 (3 = 2 + 1, 12 = 8 + 4):
    all codes are split into such parts, and the parts are packed one after the other, the low bits first.

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
    dtype = torch.int32 if _in_compiled_cpu_code(codes) else torch.uint8
    for part in PARTS[bits]:
        part_codes = codes if part == bits else (codes >> shift) & (2**part - 1)
        packed.append(_pack_part(part_codes.to(dtype), part).to(torch.uint8))
        shift += part
    return packed[0] if len(packed) == 1 else torch.cat(packed, -1)


def unpack(packed: Tensor, bits: int, width: int | None = None) -> Tensor:
    """Undo `pack`.

    Args:
        packed: The output of `pack`, [..., bytes] uint8.
        bits: 1 to 16.
        width: The number of codes; required if they do not fill their bytes, or if `bits` does not divide 8.

    Returns:
        [..., width], uint8 up to 8 bits and int32 above.

    >>> unpack(torch.tensor([49, 66], dtype=torch.uint8), 4).tolist()
    [1, 2, 3, 4]
    """
    if width is None:
        assert 8 % bits == 0, "width is required for this number of bits"
        width = packed.shape[-1] * 8 // bits
    codes: Tensor | None = None
    start = 0
    shift = 0
    dtype = torch.int32 if _in_compiled_cpu_code(packed) else torch.uint8
    for part in PARTS[bits]:
        size = -(-width * part // 8)
        part_codes = packed[..., start : start + size]
        if part < 8:
            part_codes = torch.cat(_split_bytes(part_codes.to(dtype), part), -1).to(torch.uint8)
        part_codes = part_codes[..., :width]
        # Shifted codes of more than 8 bits do not fit uint8.
        part_codes = part_codes if bits <= 8 else part_codes.int()
        codes = part_codes if codes is None else codes | (part_codes << shift)
        start += size
        shift += part
    assert codes is not None
    return codes


def unpack_float(packed: Tensor, bits: int, width: int | None = None) -> Tensor:
    """`unpack` for codes that are multiplied next: [..., width] fp32, in which all codes are exact.

    >>> unpack_float(torch.tensor([49, 66], dtype=torch.uint8), 4).tolist()
    [1.0, 2.0, 3.0, 4.0]
    """
    if len(PARTS[bits]) > 1 or bits == 8:
        return unpack(packed, bits, width).float()
    if not torch.compiler.is_compiling():
        return _split_into(packed, bits)[..., :width]
    if not _in_compiled_cpu_code(packed):
        return unpack(packed, bits, width).float()
    return torch.cat([part.float() for part in _split_bytes(packed.int(), bits)], -1)[..., :width]


def fills_bytes(packed: Tensor, bits: int, width: int) -> bool:
    """Whether each width that `bits` is a sum of fills its bytes, so that `unpack_places` splits the codes."""
    return bits <= 8 and packed.shape[-1] * 8 == width * bits and all(width * part % 8 == 0 for part in PARTS[bits])


def unpack_places(packed: Tensor, bits: int) -> list[Tensor]:
    """Codes of equally many neighboring channels, the first ones first, which are not joined.

    Where `bits` divides 8, these are the codes at one place of the bytes.

    Args:
        packed: The output of `pack`, [..., bytes] uint8, of codes that fill their bytes; see `fills_bytes`.
        bits: 1 to 8.

    Returns:
        As many codes in each as the narrowest part of a code has bytes; uint8 if there are 8 bits, else int32.

    >>> [codes.tolist() for codes in unpack_places(torch.tensor([49, 66], dtype=torch.uint8), 4)]
    [[1, 2], [3, 4]]
    """
    if bits == 8:
        return [packed]
    parts = PARTS[bits]
    count = packed.shape[-1]
    size = count * min(parts) // bits
    packed = packed.int()  # inductor (torch 2.13) shifts bytes one by one on a CPU
    codes: list[Tensor] = []
    start = 0
    shift = 0
    for part in parts:
        end = start + count * part // bits
        split = [codes for place in _split_bytes(packed[..., start:end], part) for codes in place.split(size, -1)]
        codes = [low | (high << shift) for low, high in zip(codes, split, strict=True)] if codes else split
        start = end
        shift += part
    return codes


def _pack_part(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of 1, 2, 4 or 8 bits, [..., D] of an integer type."""
    per_byte = 8 // bits
    if codes.shape[-1] % per_byte:
        codes = F.pad(codes, (0, -codes.shape[-1] % per_byte))
    # The first chunk holds the codes of the low bits of all bytes, the next one those of the bits above, and so on.
    packed, *higher = codes.chunk(per_byte, -1)
    for place, chunk in enumerate(higher, 1):
        packed = packed | (chunk << (bits * place))
    return packed


def _split_bytes(packed: Tensor, bits: int) -> list[Tensor]:
    """The codes at each place of a byte, the lowest first, each [..., bytes]."""
    return [_at_place(packed, bits, place) for place in range(8 // bits)]


def _split_into(packed: Tensor, bits: int) -> Tensor:
    """The codes at each place of a byte, the lowest first, written where they belong, [..., bytes * 8 / bits] fp32."""
    count = packed.shape[-1]
    codes = torch.empty(*packed.shape[:-1], count * 8 // bits, dtype=torch.float32, device=packed.device)
    for place, target in enumerate(codes.split(count, -1)):
        _at_place(packed, bits, place, target)
    return codes


def _at_place(packed: Tensor, bits: int, place: int, out: Tensor | None = None) -> Tensor:
    """The codes at one place of each byte, written to `out` if it is given."""
    shift = bits * place
    # The lowest codes need no shift and the highest ones no mask, which saves two operations.
    if shift == 8 - bits:
        return packed >> shift if out is None else torch.bitwise_right_shift(packed, shift, out=out)
    return torch.bitwise_and(packed >> shift if shift else packed, 2**bits - 1, out=out)


def _in_compiled_cpu_code(packed: Tensor) -> bool:
    """Whether bytes are best widened before they are split and joined.

    On a CPU, inductor (torch 2.13) joins bytes outside its kernels, in an order of dimensions in which neighboring
    channels are far apart, so that no later kernel can read vectors of them. It also converts bytes slowly.
    """
    return torch.compiler.is_compiling() and packed.device.type == "cpu"


def round_to_half(x: Tensor) -> Tensor:
    """Round fp32 numbers to the nearest numbers that fp16 can represent; the result is still fp32.

    Args:
        x: Numbers inside the range of fp16.

    >>> round_to_half(torch.tensor([0.1])).item() == torch.tensor(0.1).half().item()
    True
    """
    # `x.half().float()` is equivalent in eager mode. A compiled kernel removes such a pair of casts, and would then
    # quantize with other numbers than it stores. So the 13 bits that fp16 lacks are rounded off as integers: adding
    # 0xFFF, or 0x1000 if the last bit that stays is odd, carries into it as rounding to nearest, ties to even, does.
    raw = x.view(torch.int32)
    normal = ((raw + 0xFFF + ((raw >> 13) & 1)) & ~0x1FFF).view(torch.float32)
    # Subnormal numbers of fp16 are multiples of 2^-24.
    return torch.where(x.abs() < 2.0**-14, (x * 2.0**24).round() * 2.0**-24, normal)
