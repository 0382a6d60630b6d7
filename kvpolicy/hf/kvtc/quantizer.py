"""Codes of principal components: a few bits for each, and a shift and a scale for each group of them in each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.kernels.packing import pack, packed_width, unpack

SIDE_BITS = 32
"""Bits of the shift and the scale of a group of a token, fp16 each."""

_LARGEST = 65504.0
"""The largest number of fp16."""


class Group(NamedTuple):
    """Neighboring components of a token that share a shift and a scale.

    Attributes:
        size: How many there are.
        bits: Bits of the code of each; 0 for components that are dropped.
    """

    size: int
    bits: int

    @property
    def cost(self) -> int:
        """The bits of a token's codes of this group, and of its shift and scale."""
        return self.size * self.bits + SIDE_BITS if self.bits else 0


class Quantized(NamedTuple):
    """The codes of one group.

    Attributes:
        codes: [n, size] uint8.
        shift: The smallest component of each token, [n] fp16.
        scale: The distance of neighboring levels, [n] fp16.
    """

    codes: Tensor
    shift: Tensor
    scale: Tensor


def quantize(x: Tensor, bits: int) -> Quantized:
    """Quantize the components of a group evenly between the smallest and the largest one of each token.

    Codes are rounded with the shift and the scale as they are stored.

    Args:
        x: Components, [n, size] of a floating-point type.
        bits: Bits of a code, 1 to 8.

    Examples:
        >>> quantize(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), 2).codes.tolist()
        [[0, 1, 2, 3]]
    """
    levels = 2**bits - 1
    low = x.amin(-1)
    shift = low.clamp(-_LARGEST, _LARGEST).half()
    scale = ((x.amax(-1) - low) / levels).clamp(max=_LARGEST).half()
    step = scale.to(x.dtype)[:, None]
    above = x - shift.to(x.dtype)[:, None]
    # A scale that fp16 rounds to zero leaves all components at the shift.
    codes = torch.where(step > 0, above / step.clamp_min(1e-30), torch.zeros_like(above))
    return Quantized(codes.round().clamp(0, levels).to(torch.uint8), shift, scale)


def dequantize(held: Quantized) -> Tensor:
    """The components that codes stand for, [n, size] fp32."""
    return held.codes.float() * held.scale.float()[:, None] + held.shift.float()[:, None]


def stored_nbytes(groups: Sequence[Group], tokens: int) -> int:
    """The bytes of `stored` for this many tokens."""
    held = [group for group in groups if group.bits]
    return sum(4 * tokens + group.size * packed_width(tokens, group.bits) for group in held)


def stored(latents: Tensor, groups: Sequence[Group]) -> bytes:
    """The codes of all components as bytes: those of a component are next to each other, since they are alike.

    Args:
        latents: [n, r], of which the first components are quantized.
        groups: The groups of these components, in order.
    """
    parts: list[Tensor] = []
    start = 0
    for group in groups:
        if group.bits and len(latents):
            found = quantize(latents[:, start : start + group.size], group.bits)
            sides = [side.cpu().contiguous().view(torch.uint8) for side in (found.shift, found.scale)]
            parts += [*sides, pack(found.codes.T.contiguous(), group.bits).cpu().flatten()]
        start += group.size
    return torch.cat(parts).numpy().tobytes() if parts else b""


def read_stored(blob: bytes, groups: Sequence[Group], tokens: int) -> Tensor:
    """The components that `stored` wrote, [n, sum of the sizes] fp32; 0 for those that were dropped.

    Args:
        blob: As many bytes as `stored_nbytes` says.
        groups: The groups.
        tokens: How many tokens there are, n.
    """
    width = sum(group.size for group in groups)
    latents = torch.zeros(tokens, width, dtype=torch.float32, device="cpu")
    if not blob:
        return latents
    held = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    at = 0
    start = 0
    for group in groups:
        if group.bits:
            each = packed_width(tokens, group.bits)
            sizes = (2 * tokens, 2 * tokens, group.size * each)
            shift, scale, codes = held[at : at + sum(sizes)].split(sizes)
            codes = unpack(codes.view(group.size, each), group.bits, tokens).T
            # The bytes begin anywhere, but numbers of fp16 are read at even places.
            sides = (side.clone().view(torch.float16) for side in (shift, scale))
            latents[:, start : start + group.size] = dequantize(Quantized(codes, *sides))
            at += sum(sizes)
        start += group.size
    return latents
