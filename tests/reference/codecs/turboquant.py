"""Keys as a norm and a direction whose mixed channels are about normal; values token by token."""

from __future__ import annotations

import functools
import math
from itertools import pairwise

import numpy as np
from torch import Tensor

from ..coding import Codec, Config
from ..scalars import Coded, complete, grouped, half, half_tie, largest_divisor, nearest, scalars, vector
from ._common import Books, lone, only, side_bits
from .rotate import mixing, times, transposed

DEFAULTS: Config = {"bits": 4, "key_bits": "auto", "value_bits": "auto"}
SMALL = "turboquant:residual_length=2:block_size=4"
GROUP = 128


def density(x: float) -> float:
    """Of N(0, 1)."""
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def share_below(x: float) -> float:
    """Of N(0, 1)."""
    return math.erfc(-x / math.sqrt(2)) / 2


@functools.cache
def lloyd_max(bits: int) -> list[float]:
    """The levels of least mean squared error for N(0, 1), ascending.

    A level is the mean of what is nearest to it, and what is nearest to it ends half way to its neighbors.
    """
    count = 2**bits
    levels = [4 * (j + 0.5) / count - 2 for j in range(count)]
    for _ in range(20000):
        edges = [-math.inf, *[(a + b) / 2 for a, b in pairwise(levels)], math.inf]
        new = [(density(a) - density(b)) / (share_below(b) - share_below(a)) for a, b in pairwise(edges)]
        moved = max(abs(a - b) for a, b in zip(new, levels, strict=True))
        levels = new
        if moved < 1e-13:
            break
    return levels


class Head:
    """One KV head; nothing is fitted.

    Attributes:
        margin: How near a number of a key, as a share of its norm, came to a tie. Mixed channels are sums, which fp32
            rounds by their order; a value's are not.
    """

    def __init__(self, config: Config, head_dim: int, signs: list[float]) -> None:
        """Start.

        Args:
            config: `bits`.
            head_dim: Channels.
            signs: 1 or -1 for each channel, by which a key is multiplied before it is mixed.
        """
        self.config = complete(DEFAULTS, config)
        self.width = largest_divisor(head_dim, GROUP)
        self.signs = signs
        self.matrix = mixing(head_dim)
        self.margin = math.inf

    def fit(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Nothing depends on the sequence."""

    def code(self, key: Tensor, value: Tensor) -> Coded:
        """Codes of a token, and what is read back of its key and value."""
        bits, value_bits = side_bits(self.config)
        xs = scalars(key)
        levels = lloyd_max(bits)
        root = math.sqrt(len(xs))
        size = math.sqrt(math.fsum(float(x) ** 2 for x in xs))
        mixed = times([x * np.float32(sign) for x, sign in zip(xs, self.signs, strict=True)], self.matrix)
        codes = [nearest(np.float32(float(x) / size * root), levels) if size else 0 for x in mixed]
        norm = float(half(size))
        if size:
            edges = [(a + b) / 2 for a, b in pairwise(levels)]
            near = min(abs(float(x) / size - edge / root) for x in mixed for edge in edges)
            self.margin = min(self.margin, near, half_tie(size) / size)
        unmixed = times([np.float32(norm * levels[code] / root) for code in codes], transposed(self.matrix))
        key_read = [x * np.float32(sign) for x, sign in zip(unmixed, self.signs, strict=True)]
        value_codes, value_read = grouped(scalars(value), self.width, value_bits)
        return {"key": [float(code) for code in codes], "value": value_codes}, vector(key_read), vector(value_read)


def codec(config: Config, calibration: Books) -> Codec:
    """The codec as the engine sees it."""
    own = only(config, DEFAULTS)
    return lone(config, lambda layer, head, dim, given: Head(own, dim, calibration(layer)["signs"].tolist()))
