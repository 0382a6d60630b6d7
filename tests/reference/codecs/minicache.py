"""One direction for two layers: a token's vectors by the equations, number by number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..coding import Codec, Config
from ..scalars import LARGEST_HALF, half, scalars, vector
from ._common import Books, lone

SMALL = "minicache:start=0:keep=0.2:residual_length=4:block_size=4"

Numbers = list[float]


def rounded(x: Tensor) -> Numbers:
    """The nearest numbers of fp16."""
    return [float(half(number)) for number in scalars(x)]


def length(x: Numbers) -> float:
    return math.sqrt(math.fsum(number * number for number in x))


def unit(x: Numbers) -> Numbers:
    """x / |x|; 0 for 0."""
    norm = length(x)
    return [number / norm for number in x] if norm else x


def angle(one: Numbers, other: Numbers) -> float:
    """W = acos(u . v); 0 where a vector is 0."""
    if not any(one) or not any(other):
        return 0.0
    return math.acos(max(-1.0, min(1.0, math.fsum(a * b for a, b in zip(one, other, strict=True)))))


def between(one: Numbers, other: Numbers, t: float) -> Numbers:
    """e = sin((1 - t) W) / sin W * u + sin(t W) / sin W * v, as a unit vector; on a line where sin W < 1e-6."""
    if not any(one) or not any(other):
        return other if not any(one) else one
    w = angle(one, other)
    if math.sin(w) < 1e-6:
        a = 1 - t
        b = t
    else:
        a = math.sin((1 - t) * w) / math.sin(w)
        b = math.sin(t * w) / math.sin(w)
    mixed = [a * x + b * y for x, y in zip(one, other, strict=True)]
    return one if length(mixed) < 1e-6 else unit(mixed)


def restored(direction: Numbers, norm: float) -> Tensor:
    """e |x|, of a direction and a norm in fp16, to which they are rounded from fp32."""
    short = half(np.float32(min(norm, LARGEST_HALF)))
    return vector([half(np.float32(number)) * short for number in direction])


class Side:
    """The keys, or the values, of one head in both layers of a pair.

    Attributes:
        read: What each layer reads of each slot.
        whole: Slots of the tokens that are stored whole, those of the largest angle first.
    """

    def __init__(self, t: float, keep: float) -> None:
        """Start without tokens."""
        self.t = t
        self.keep = keep
        self.near: dict[int, list[Tensor]] = {}
        self.exact: dict[int, list[Tensor]] = {}
        self.angles: dict[int, float] = {}
        self.whole: list[int] = []

    def write(self, slots: list[int], first: list[Tensor], second: list[Tensor], live: set[int]) -> None:
        """Encode a token of both layers in each slot, beside the slots that hold a token that stays."""
        if not slots:
            return
        for slot, one, other in zip(slots, first, second, strict=True):
            halves = [rounded(one), rounded(other)]
            units = [unit(x) for x in halves]
            direction = between(units[0], units[1], self.t)
            self.near[slot] = [restored(direction, length(x)) for x in halves]
            self.exact[slot] = [torch.tensor(x) for x in halves]
            self.angles[slot] = angle(*units)
        count = math.ceil(self.keep * (len(live) + len(slots)))
        candidates = [slot for slot in self.whole if slot in live] + slots
        self.whole = sorted(candidates, key=lambda slot: -self.angles[slot])[:count]

    def read(self, layer: int, slot: int) -> Tensor:
        """The vector that a layer reads of a slot."""
        return (self.exact if slot in self.whole else self.near)[slot][layer]


class Head:
    """One KV head of a layer without a partner: its own directions and norms."""

    def fit(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Nothing is fitted."""

    def code(self, key: Tensor, value: Tensor) -> tuple[Any, Tensor, Tensor]:
        """A token as it is read back."""
        return None, self._read(key), self._read(value)

    def _read(self, x: Tensor) -> Tensor:
        numbers = rounded(x)
        return restored(unit(numbers), length(numbers))


def codec(config: Config, calibration: Books) -> Codec:
    """The codec of a layer without a partner, as the engine sees it."""
    return lone(config, lambda layer, head, dim, given: Head())
