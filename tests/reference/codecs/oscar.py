"""OSCAR, number by number: a given rotation, the largest numbers clipped, then few bits token by token."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from ..coding import Codec, Config, Given
from ..scalars import Coded, complete, encode, frame, grouped, half_tie, integer_tie, largest_divisor, scalars, vector
from ._common import Alone, Books, lone, only, side_bits
from .rotate import Matrix, times, transposed

DEFAULTS: Config = {
    "bits": 2,
    "key_bits": "auto",
    "value_bits": "auto",
    "group_size": 128,
    "key_clip": 0.96,
    "value_clip": 0.92,
}
SMALL = "oscar:group_size=4:sinks=2:residual_length=2:block_size=4:key_clip=0.8:calibration=FOLDER/oscar"


def clipped(xs: list[np.float32], inside: float) -> list[np.float32]:
    """Numbers that are no larger than the one of this rank by size."""
    if inside == 1:
        return xs
    bound = sorted(abs(x) for x in xs)[math.floor(inside * len(xs))]
    return [min(max(x, -bound), bound) for x in xs]


class Head:
    """One KV head.

    Attributes:
        margin: How near a number came to a tie, as a share of the largest number of its vector.
    """

    def __init__(self, config: Config, head_dim: int, keys: Matrix, values: Matrix) -> None:
        """Take the rotations, row by row."""
        self.config = complete(DEFAULTS, config)
        self.width = largest_divisor(head_dim, self.config["group_size"])
        self.rotations = (keys, values)
        self.margin = math.inf

    def fit(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Nothing is fitted."""

    def code(self, key: Tensor, value: Tensor) -> Coded:
        """Codes of a token, and what is read back of its key and value."""
        found = [self._side(x, which) for which, x in enumerate((key, value))]
        return {"key": found[0][0], "value": found[1][0]}, found[0][1], found[1][1]

    def _side(self, x: Tensor, which: int) -> tuple[list[float], Tensor]:
        bits = side_bits(self.config)[which]
        xs = clipped(times(scalars(x), self.rotations[which]), self.config[("key_clip", "value_clip")[which]])
        codes, read = grouped(xs, self.width, bits)
        self._note(xs, bits)
        return codes, vector(times(read, transposed(self.rotations[which])))

    def _note(self, xs: list[np.float32], bits: int) -> None:
        size = float(max(abs(x) for x in xs))
        for start in range(0, len(xs), self.width) if size else ():
            some = xs[start : start + self.width]
            by = frame(some, bits)
            step = (max(some) - min(some)) / np.float32(2**bits - 1)
            near = [half_tie(step) * (2**bits - 1), half_tie(min(some))]
            if by.scale:
                assert all(0 <= encode(x, by, bits) < 2**bits for x in some)
                near += [integer_tie((x - by.zero) / by.scale) * float(by.scale) for x in some]
            self.margin = min(self.margin, *(x / size for x in near))


def codec(config: Config, calibration: Books) -> Codec:
    """The codec as the engine sees it."""
    own = only(config, DEFAULTS)

    def make(layer: int, head: int, dim: int, given: Given) -> Alone:
        have = calibration(layer)
        keys, values = (have[f"{side}.rotation"].expand(head + 1, -1, -1)[head].tolist() for side in ("keys", "values"))
        return Head(own, dim, keys, values)

    return lone(config, make, pins="first" if config["sinks"] else "none", pinned=config["sinks"])
