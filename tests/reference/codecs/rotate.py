"""Few bits per number, token by token, after channels were mixed by an orthonormal matrix."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from torch import Tensor

from ..coding import Codec, Config
from ..scalars import Coded, complete, descending, half, half_tie, integer_tie, largest_divisor, scalars, vector
from ._common import Books, lone, only, side_bits

DEFAULTS: Config = {"bits": 2, "key_bits": "auto", "value_bits": "auto", "group_size": 128}
SMALL = "rotate:group_size=4:sinks=2:residual_length=2:block_size=4"
Matrix = list[list[float]]


def hadamard(size: int) -> Matrix:
    """Sylvester's Hadamard matrix of a power of two, orthonormal: the sign is the parity of the common bits."""
    return [[(-1) ** (i & j).bit_count() / math.sqrt(size) for j in range(size)] for i in range(size)]


def cosines(size: int) -> Matrix:
    """The orthonormal DCT-II: column j is the cosine of frequency j."""
    rows = [
        [math.sqrt(2 / size) * math.cos(math.pi * (2 * i + 1) * j / (2 * size)) for j in range(size)]
        for i in range(size)
    ]
    return [[x / math.sqrt(2) if j == 0 else x for j, x in enumerate(row)] for row in rows]


def mixing(head_dim: int) -> Matrix:
    """Kronecker product of the Hadamard matrix of the power of two in `head_dim` and the DCT of the odd rest."""
    power = head_dim & -head_dim
    outer = hadamard(power)
    inner = cosines(head_dim // power)
    odd = len(inner)
    return [[outer[i // odd][j // odd] * inner[i % odd][j % odd] for j in range(head_dim)] for i in range(head_dim)]


def times(xs: list[np.float32], matrix: Matrix) -> list[np.float32]:
    """x @ R."""
    return [np.float32(math.fsum(float(x) * row[j] for x, row in zip(xs, matrix, strict=True))) for j in range(len(xs))]


def transposed(matrix: Matrix) -> Matrix:
    """R'; the inverse of an orthonormal R."""
    return [list(row) for row in zip(*matrix, strict=True)]


def integer_zero(xs: list[np.float32], bits: int) -> tuple[list[float], list[np.float32]]:
    """Codes of one group whose zero is itself a code, and what is read back; the range always includes 0.

    Equal numbers are one step from the zero.
    """
    clip = np.float32(0.8 if bits == 2 else 1.0)
    most = 2**bits - 1
    if min(xs) == max(xs):
        step = half(xs[0])
        return [1.0 if step else 0.0] * len(xs), [step] * len(xs)
    low = min(*xs, np.float32(0)) * clip
    high = max(*xs, np.float32(0)) * clip
    scale = half((high - low) / np.float32(most))
    if scale == 0:
        return [0.0] * len(xs), [np.float32(0)] * len(xs)
    zero = int(min(max(np.round(-low / scale), 0), most))
    codes = [int(min(max(np.round(x / scale) + zero, 0), most)) for x in xs]
    return [float(code) for code in codes], [np.float32(code - zero) * scale for code in codes]


def nearest_tie(xs: list[np.float32], bits: int) -> float:
    """The least change of a number of a group that may change its scale, its zero or a code: see `integer_zero`."""
    clip = 0.8 if bits == 2 else 1.0
    most = 2**bits - 1
    if min(xs) == max(xs):
        return half_tie(xs[0])
    low = float(min(*xs, np.float32(0))) * clip
    high = float(max(*xs, np.float32(0))) * clip
    scale = float(half((high - low) / most))
    if scale == 0:
        return math.inf
    codes = [integer_tie(x / scale) for x in (low, *map(float, xs))]
    return min(half_tie((high - low) / most) * most, scale * min(codes))


class Head:
    """One KV head: the order of its mixed key channels.

    Attributes:
        margin: How near a number came to a tie, as a share of the largest number of its vector. Mixed channels are
            sums, which fp32 rounds by their order.
    """

    def __init__(self, config: Config, head_dim: int) -> None:
        """Start with the channels as they are."""
        self.config = complete(DEFAULTS, config)
        self.width = largest_divisor(head_dim, self.config["group_size"])
        self.matrix = mixing(head_dim)
        self.order = list(range(head_dim))
        self.margin = math.inf

    def fit(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Order the mixed channels by their sum of magnitudes, the largest first."""
        mixed = [times(scalars(key), self.matrix) for key in keys]
        sums = [math.fsum(abs(float(xs[c])) for xs in mixed) for c in range(len(self.order))]
        self.order = descending(sums)
        if self.width < len(sums):
            gaps = [a - b for a, b in pairwise(sorted(sums, reverse=True))]
            self.margin = min([self.margin, *(gap / max(sums) for gap in gaps if max(sums))])

    def code(self, key: Tensor, value: Tensor) -> Coded:
        """Codes of a token, and what is read back of its key and value."""
        key_bits, value_bits = side_bits(self.config)
        key_codes, key_read = self._mixed(scalars(key), self.order, key_bits)
        value_codes, value_read = self._mixed(scalars(value), list(range(len(self.order))), value_bits)
        return {"key": key_codes, "value": value_codes}, vector(key_read), vector(value_read)

    def _mixed(self, xs: list[np.float32], order: list[int], bits: int) -> tuple[list[float], list[np.float32]]:
        mixed = times(xs, self.matrix)
        size = float(max(abs(x) for x in mixed))
        codes: list[float] = []
        read = [np.float32(0)] * len(xs)
        for start in range(0, len(xs), self.width):
            some = order[start : start + self.width]
            part, inner = integer_zero([mixed[c] for c in some], bits)
            if size:
                self.margin = min(self.margin, nearest_tie([mixed[c] for c in some], bits) / size)
            codes += part
            for c, x in zip(some, inner, strict=True):
                read[c] = x
        return codes, times(read, transposed(self.matrix))


def codec(config: Config, calibration: Books) -> Codec:
    """The codec as the engine sees it."""
    own = only(config, DEFAULTS)
    return lone(
        config,
        lambda layer, head, dim, given: Head(own, dim),
        key_space="unrotated",
        pins="massive",
        pinned=config["sinks"],
    )
