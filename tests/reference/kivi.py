"""KIVI, scalar by scalar: keys in groups of tokens per channel, values in groups of channels per token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .selectors import Config

DEFAULTS: Config = {"bits": 2, "group_size": 32, "residual_length": 128}


class Frame(NamedTuple):
    """Scale and zero of one group, rounded to fp16 and held as fp32."""

    scale: np.float32
    zero: np.float32


def frame(xs: list[float], bits: int) -> Frame:
    """The scale and zero of the scalars of one group."""
    low, high = np.float32(min(xs)), np.float32(max(xs))
    step = (high - low) / np.float32(2**bits - 1)
    return Frame(np.float32(np.float16(step)), np.float32(np.float16(low)))


def encode(x: float, by: Frame, bits: int) -> int:
    """The code of a scalar, clipped to the range of its group's frame."""
    if by.scale == 0:
        return 0
    code = np.round((np.float32(x) - by.zero) / by.scale)  # half to even
    return int(min(max(code, 0), 2**bits - 1))


def decode(code: int, by: Frame) -> float:
    """The scalar that a code stands for."""
    return float(np.float32(code) * by.scale + by.zero)


def stand_in(x: float, by: Frame, bits: int) -> float:
    """What is read back after a scalar was coded."""
    return decode(encode(x, by, bits), by)


def value_group(head_dim: int, group_size: int) -> int:
    """Channels in one group of a value: the largest divisor of `head_dim` not above `group_size`."""
    return max(g for g in range(1, head_dim + 1) if head_dim % g == 0 and g <= group_size)


def coded_value(value: Tensor, bits: int, group_size: int) -> Tensor:
    """What is read back of one token's value [D], in its dtype."""
    xs = value.tolist()
    width = value_group(len(xs), group_size)
    read: list[float] = []
    for start in range(0, len(xs), width):
        part = xs[start : start + width]
        by = frame(part, bits)
        read += [stand_in(x, by, bits) for x in part]
    return torch.tensor(read, dtype=torch.float32).to(value.dtype)


def key_frames(keys: list[Tensor], bits: int) -> list[Frame]:
    """A frame per channel over the tokens [D] of one group."""
    return [frame([float(key[c]) for key in keys], bits) for c in range(len(keys[0]))]


def coded_key(key: Tensor, frames: list[Frame], bits: int) -> Tensor:
    """What is read back of one token's key [D] in its group's frames, in its dtype."""
    read = [stand_in(float(x), by, bits) for x, by in zip(key, frames, strict=True)]
    return torch.tensor(read, dtype=torch.float32).to(key.dtype)


class CodedPart:
    """The coded slots of one KV head: who lives where, and each group's frozen frames."""

    def __init__(self, config: Config, groups: int | None) -> None:
        """Start empty.

        Args:
            config: `bits`, `group_size`, `residual_length`.
            groups: How many groups there are; None adds one whenever no group is empty.
        """
        self.bits = config["bits"]
        self.size = config["group_size"]
        self.endless = groups is None
        self.slots: list[int | None] = []
        self.frames: list[list[Frame]] = []
        self.grow(groups or 0)

    def grow(self, groups: int) -> None:
        """Append empty groups until there are `groups`."""
        while len(self.frames) < groups:
            self.slots += [None] * self.size
            self.frames.append([])

    def live(self, group: int) -> int:
        """How many slots of a group hold a token that stays."""
        return sum(p is not None for p in self.slots[group * self.size : (group + 1) * self.size])

    def drop(self, position: int) -> None:
        """Forget a token; its slot is dead from now on."""
        if position in self.slots:
            self.slots[self.slots.index(position)] = None

    def flush(self, positions: list[int], keys: list[Tensor], values: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Code one group of tokens, oldest first, and return what is read back of each key and value."""
        assert len(positions) == self.size, "a flush moves exactly one group"
        empty = [g for g in range(len(self.frames)) if self.live(g) == 0]
        if not empty and self.endless:
            self.grow(len(self.frames) + 1)
            empty = [len(self.frames) - 1]
        if empty:
            self.frames[empty[0]] = key_frames(keys, self.bits)
            slots = list(range(empty[0] * self.size, (empty[0] + 1) * self.size))
        else:
            dead = [s for s, p in enumerate(self.slots) if p is None]
            live = [self.live(g) for g in range(len(self.frames))]
            slots = sorted(dead, key=lambda s: (live[s // self.size], s))[: self.size]
        assert len(slots) == self.size, "too few dead slots for a flush"
        for slot, position in zip(slots, positions, strict=True):
            self.slots[slot] = position
        return [
            (coded_key(key, self.frames[slot // self.size], self.bits), coded_value(value, self.bits, self.size))
            for slot, key, value in zip(slots, keys, values, strict=True)
        ]
