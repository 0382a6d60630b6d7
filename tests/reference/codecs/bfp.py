"""Block floating point: some channels of one token share an exponent."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from ..coding import Codec, Config
from ..scalars import Coded, column, complete, descending, half, scalars, vector
from ._common import Books, lone, only

DEFAULTS: Config = {"mantissa": 4, "block_channels": 32, "exact_values": False}
SMALL = "bfp:block_channels=4:residual_length=3:block_size=4"


def exponent(xs: list[np.float32]) -> int:
    """e of the largest magnitude m * 2^e, 1 <= m < 2, in the range of 8 bits."""
    largest = max(abs(float(x)) for x in xs)
    return min(max(math.frexp(largest)[1] - 1, -126), 127) if largest else -126


def blocks(xs: list[np.float32], width: int, mantissa: int) -> tuple[list[float], list[np.float32]]:
    """Signed mantissas of one token, and what is read back; the last block may be shorter.

    A mantissa has `mantissa` bits with its sign: the largest magnitude, between 1 and 2 times 2^e, becomes
    2^(mantissa - 2) to 2^(mantissa - 1) steps, of which the last is clipped.
    """
    most = 2 ** (mantissa - 1) - 1
    codes: list[float] = []
    read: list[np.float32] = []
    for start in range(0, len(xs), width):
        part = xs[start : start + width]
        step = 2.0 ** (exponent(part) - (mantissa - 2))
        some = [min(max(round(float(x) / step), -most), most) for x in part]  # half to even
        codes += some
        read += [np.float32(code * step) for code in some]
    return codes, read


class Head:
    """One KV head: the order of its key channels."""

    def __init__(self, config: Config, head_dim: int) -> None:
        """Start with the channels as they are."""
        self.config = complete(DEFAULTS, config)
        self.width = self.config["block_channels"]
        self.order = list(range(head_dim))

    def fit(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Order the channels by their norm over the tokens, the largest first."""
        norms = [math.sqrt(math.fsum(float(x) ** 2 for x in column(keys, c))) for c in range(len(self.order))]
        self.order = descending(norms)

    def code(self, key: Tensor, value: Tensor) -> Coded:
        """Codes of a token, and what is read back of its key and value."""
        xs = scalars(key)
        key_codes, inner = blocks([xs[c] for c in self.order], self.width, self.config["mantissa"])
        key_read = [np.float32(0)] * len(xs)
        for place, c in enumerate(self.order):
            key_read[c] = inner[place]
        if self.config["exact_values"]:
            return {"key": key_codes}, vector(key_read), vector([half(x) for x in scalars(value)])
        value_codes, value_read = blocks(scalars(value), self.width, self.config["mantissa"])
        return {"key": key_codes, "value": value_codes}, vector(key_read), vector(value_read)


def codec(config: Config, calibration: Books) -> Codec:
    """The codec as the engine sees it."""
    own = only(config, DEFAULTS)
    return lone(config, lambda layer, head, dim, given: Head(own, dim))
