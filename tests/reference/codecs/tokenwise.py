"""Few bits per number, token by token, after keys were normalized channel by channel."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from ..coding import Codec, Config
from ..scalars import Coded, column, complete, e4m3, grouped, half, largest_divisor, scalars, vector
from ._common import Books, lone, only, side_bits

DEFAULTS: Config = {"bits": 4, "key_bits": "auto", "value_bits": "auto", "group_size": 128, "normalize": True}
SMALL = "tokenwise:group_size=4:residual_length=4:block_size=4"


def fp8(xs: list[np.float32], width: int) -> tuple[list[float], list[np.float32]]:
    """Numbers as e4m3, scaled so that the largest of a group is 448, and what is read back."""
    codes: list[float] = []
    read: list[np.float32] = []
    for start in range(0, len(xs), width):
        part = xs[start : start + width]
        scale = half(max(abs(x) for x in part) / np.float32(448))
        some = [e4m3(x / scale) if scale else 0.0 for x in part]
        codes += some
        read += [np.float32(code) * scale for code in some]
    return codes, read


class Head:
    """One KV head: what its keys are normalized by."""

    def __init__(self, config: Config, head_dim: int) -> None:
        """Start with a normalizer that does nothing."""
        self.config = complete(DEFAULTS, config)
        self.width = largest_divisor(head_dim, self.config["group_size"])
        self.mean = [np.float32(0)] * head_dim
        self.std = [np.float32(1)] * head_dim

    def fit(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Take mean and population std of each channel of the keys.

        The std is 1 where a channel does not vary. It is no less than the error of the rounded mean, or numbers of a
        channel that hardly varies would be large.
        """
        if not self.config["normalize"]:
            return
        for c in range(len(self.mean)):
            xs = column(keys, c)
            # Differences, squares, mean and deviation are rounded to fp32 before fp16: at a tie of fp16, rounding twice
            # gives another number than rounding once.
            mean = np.float32(math.fsum(xs) / len(xs))
            squares = [(x - mean) * (x - mean) for x in xs]
            std = float(np.float32(math.sqrt(math.fsum(squares) / len(xs))))
            std = std if half(std) > 0 and max(xs) > min(xs) else 1.0
            self.mean[c] = half(mean)
            self.std[c] = half(max(std, abs(float(mean) - float(self.mean[c]))))

    def code(self, key: Tensor, value: Tensor) -> Coded:
        """Codes of a token, and what is read back of its key and value."""
        normal = [(x - m) / s for x, m, s in zip(scalars(key), self.mean, self.std, strict=True)]
        key_bits, value_bits = side_bits(self.config)
        key_codes, key_read = self._grouped(normal, key_bits)
        value_codes, value_read = self._grouped(scalars(value), value_bits)
        key_read = [x * s + m for x, m, s in zip(key_read, self.mean, self.std, strict=True)]
        return {"key": key_codes, "value": value_codes}, vector(key_read), vector(value_read)

    def _grouped(self, xs: list[np.float32], bits: Any) -> tuple[list[float], list[np.float32]]:
        return fp8(xs, self.width) if bits == "fp8" else grouped(xs, self.width, int(bits))


def codec(config: Config, calibration: Books) -> Codec:
    """The codec as the engine sees it."""
    own = only(config, DEFAULTS)
    return lone(config, lambda layer, head, dim, given: Head(own, dim))
