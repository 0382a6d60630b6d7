"""Uniform codes of one token's channels: a scale and a zero for each group of them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.codecs._common import is_fresh
from kvpolicy.codecs.packing import pack, round_to_half, unpack

FP16 = torch.finfo(torch.float16).max


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is not above `most`.

    >>> largest_divisor(80, 32), largest_divisor(7, 4)
    (20, 1)
    """
    return max(size for size in range(1, min(most, number) + 1) if number % size == 0)


def quantize(x: Tensor, bits: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize every `size` neighbours of the last dimension from their minimum to their maximum.

    A group whose numbers are all equal has the scale and code 0. What is too large for fp16 is clipped.

    Args:
        x: [..., D] fp32.
        bits: Bits per code, 1 to 8.
        size: Numbers of a group, a divisor of D.

    Returns:
        Codes [..., packed_width(D, bits)] uint8, scale and zero [..., D / size] fp16.

    >>> codes, scale, zero = quantize(torch.tensor([-1.0, 2.0, 5.0, 5.0]), 2, 2)
    >>> scale.tolist(), zero.tolist()
    ([1.0, 0.0], [-1.0, 5.0])
    >>> dequantize(codes, scale, zero, 2, 4).tolist()
    [-1.0, 2.0, 5.0, 5.0]
    """
    grouped = x.unflatten(-1, (-1, size))
    least, most = torch.aminmax(grouped, dim=-1, keepdim=True)
    scale, zero = frame(least, most, bits)
    code = codes_in(grouped, scale, zero, bits)
    return pack(code.flatten(-2), bits), scale.squeeze(-1).half(), zero.squeeze(-1).half()


def frame(least: Tensor, most: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and zero of groups, fp32 as fp16 has them, clipped so that none is infinite."""
    scale = (most - least) / (2**bits - 1)
    return round_to_half(scale.clamp(max=FP16)), round_to_half(least.clamp(-FP16, FP16))


def codes_in(x: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Codes of `x` with the scale and zero that are stored, clipped to their range, uint8; 0 where the scale is."""
    flat = scale == 0
    code = ((x - zero) / scale.masked_fill(flat, 1)).round().clamp(0, 2**bits - 1)
    return code.masked_fill(flat, 0).to(torch.uint8)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor, bits: int, width: int) -> Tensor:
    """Undo `quantize`: [..., width] fp32.

    Args:
        codes: What `quantize` packed, [..., bytes] uint8.
        scale: [..., groups] fp16.
        zero: [..., groups] fp16.
        bits: Bits per code.
        width: How many numbers there are.
    """
    grouped = unpack(codes, bits, width).unflatten(-1, (scale.shape[-1], -1))
    return (grouped * scale.float()[..., None]).add_(zero.float()[..., None]).flatten(-2)


def largest_size(x: Tensor, write_mask: Tensor) -> Tensor:
    """The largest absolute number of each channel of `x` [B, H, n, D], [B, H, 1, D]; 0 where no token is write_mask."""
    return x.abs().masked_fill(~write_mask[..., None], 0).amax(2, keepdim=True)


def settle(stored: Tensor, fitted: Tensor, write_mask: Tensor, occupied: Tensor) -> Tensor:
    """Fix what a sequence's tokens share where a head has no occupied token, and return what holds now.

    Args:
        stored: [B, H, 1, D] fp16, changed in place in heads where a token is written and none is occupied.
        fitted: To the tokens that are written, [B, H, 1, D] fp32, numbers that fp16 has.
        write_mask: [B, H, n] bool.
        occupied: [B, H, C] bool.

    Returns:
        [B, H, 1, D] fp32.
    """
    fresh = is_fresh(write_mask, occupied)
    now = torch.where(fresh, fitted, stored.float())
    stored.copy_(now)
    return now
