"""KIVI, scalar by scalar: keys in groups of tokens per channel, values in groups of channels per token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..coding import Codec, Config, Given, Pair
from ._common import Books, grouped, side_bits

DEFAULTS: Config = {"bits": 2, "key_bits": "auto", "value_bits": "auto", "group_size": 32, "residual_length": 128}
SMALL = "kivi:group_size=4:residual_length=4"


class Frame(NamedTuple):
    """Scale and zero of one group, rounded to fp16 and held as fp32."""

    scale: np.float32
    zero: np.float32


def frame(xs: list[float], bits: int) -> Frame:
    """The scale and zero of the scalars of one group."""
    low = np.float32(min(xs))
    high = np.float32(max(xs))
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


class Head:
    """One stage of one KV head: each group's frames, which stay until all of the group is dead."""

    def __init__(self, config: Config) -> None:
        """Start without groups; `config` has `bits` and `group_size`."""
        self.key_bits, self.value_bits = side_bits(config)
        self.size = config["group_size"]
        self.frames: dict[int, list[Frame]] = {}

    def write(self, slots: list[int], tokens: list[Pair], live: list[bool], given: Given) -> list[Pair]:
        """See `stages.Coder`."""
        for group in {slot // self.size for slot in slots}:
            if not any(live[group * self.size : (group + 1) * self.size]):
                keys = [key for slot, (key, _) in zip(slots, tokens, strict=True) if slot // self.size == group]
                self.frames[group] = key_frames(keys, self.key_bits)
        return [
            (
                coded_key(key, self.frames[slot // self.size], self.key_bits),
                coded_value(value, self.value_bits, self.size),
            )
            for slot, (key, value) in zip(slots, tokens, strict=True)
        ]


def codec(config: Config, calibration: Books) -> Codec:
    """The codec as the engine sees it."""
    return grouped(config, lambda: Head(config))
