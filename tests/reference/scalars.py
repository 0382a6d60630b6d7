"""Rounding and grouping, number by number, for the reference codecs."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .coding import Config

Scalar = float | np.float32
Codes = dict[str, list[float]]
Coded = tuple[Codes, Tensor, Tensor]
LARGEST_HALF = 65504.0


def complete(defaults: Config, given: Config) -> Config:
    """A codec's parameters with its defaults filled in."""
    unknown = set(given) - set(defaults)
    if unknown:
        raise ValueError(f"There is no {sorted(unknown)}; there is {sorted(defaults)}.")
    return {**defaults, **given}


def half(x: Scalar) -> np.float32:
    """The nearest number that fp16 has, held as fp32; what is too large becomes its largest."""
    return np.float32(np.float16(min(max(float(x), -LARGEST_HALF), LARGEST_HALF)))


def half_tie(x: Scalar) -> float:
    """How far a number is from the nearest one that lies half way between two numbers of fp16."""
    near = np.float16(min(max(float(x), -LARGEST_HALF), LARGEST_HALF))
    ties = [(float(near) + float(np.nextafter(near, np.float16(to)))) / 2 for to in (-LARGEST_HALF, LARGEST_HALF)]
    return min(abs(float(x) - tie) for tie in ties)


def integer_tie(x: Scalar) -> float:
    """How far a number is from the nearest one that lies half way between two integers."""
    return abs(float(x) - math.floor(float(x)) - 0.5)


def e4m3(x: Scalar) -> float:
    """The nearest number that fp8 e4m3 has, ties to the even one; what is too large becomes 448."""
    size = min(abs(float(x)), 448.0)
    exponent = max(math.frexp(size)[1] - 1, -6) if size else -6
    step = 2.0 ** (exponent - 3)
    return math.copysign(round(size / step) * step, float(x))


def largest_divisor(width: int, most: int) -> int:
    """The largest divisor of `width` that is not above `most`."""
    return max(d for d in range(1, width + 1) if width % d == 0 and d <= most)


def scalars(x: Tensor) -> list[np.float32]:
    """A vector's numbers in fp32."""
    return [np.float32(v) for v in x.float().tolist()]


def vector(xs: list[np.float32]) -> Tensor:
    """Numbers as a vector [D] in fp32."""
    return torch.tensor([float(x) for x in xs], dtype=torch.float32)


def column(tokens: list[Tensor], channel: int) -> list[np.float32]:
    """One channel of some tokens."""
    return [np.float32(float(token[channel])) for token in tokens]


def descending(worth: list[float]) -> list[int]:
    """Indices of numbers from the largest to the smallest; equal ones in their order."""
    return sorted(range(len(worth)), key=lambda j: (-worth[j], j))


class Frame(NamedTuple):
    """Scale and zero of a group, as fp16 has them."""

    scale: np.float32
    zero: np.float32


def frame(xs: list[np.float32], bits: int) -> Frame:
    """The frame from the least to the largest number of a group."""
    low = min(xs)
    high = max(xs)
    return Frame(half((high - low) / np.float32(2**bits - 1)), half(low))


def encode(x: np.float32, by: Frame, bits: int) -> int:
    """The code of a number, clipped to the frame."""
    if by.scale == 0:
        return 0
    return int(min(max(np.round((x - by.zero) / by.scale), 0), 2**bits - 1))  # half to even


def decode(code: int, by: Frame) -> np.float32:
    """The number of a code."""
    return np.float32(code) * by.scale + by.zero


def grouped(xs: list[np.float32], width: int, bits: int) -> tuple[list[float], list[np.float32]]:
    """Codes of one token in groups of `width` channels, each with a frame, and what is read back."""
    codes: list[float] = []
    read: list[np.float32] = []
    for start in range(0, len(xs), width):
        by = frame(xs[start : start + width], bits)
        some = [encode(x, by, bits) for x in xs[start : start + width]]
        codes += some
        read += [decode(code, by) for code in some]
    return codes, read


def nearest(x: np.float32, levels: list[float]) -> int:
    """Which of the ascending levels is nearest; of two, the lower."""
    return min(range(len(levels)), key=lambda j: (abs(float(x) - levels[j]), j))
