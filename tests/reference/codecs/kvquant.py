"""Nearest of a few calibrated levels, with the outliers of every vector kept exact."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import numpy as np
from torch import Tensor

from ..coding import Codec, Config, Given
from ..scalars import LARGEST_HALF, Coded, complete, descending, half, half_tie, nearest, scalars, vector
from ._common import Alone, Books, lone, only

DEFAULTS: Config = {"bits": 3, "outliers": 0.01, "center": "median"}
SMALL = "kvquant:outliers=0.1:sinks=2:residual_length=2:block_size=3:calibration=FOLDER/kvquant"


def clipped(x: Tensor) -> list[np.float32]:
    """A vector's numbers, clipped to the range of fp16 first, since its outliers and frame are kept in fp16."""
    return [min(max(v, np.float32(-LARGEST_HALF)), np.float32(LARGEST_HALF)) for v in scalars(x)]


class Head:
    """One KV head; nothing is fitted, all is calibrated.

    Attributes:
        margin: How near a number of a key came to a tie, as a share of the key's largest number. Keys come without
            their rotary embedding, which fp32 takes away by sums; values come as they are.
    """

    def __init__(
        self,
        config: Config,
        head_dim: int,
        offset: list[float],
        range_: list[float],
        key_levels: list[float],
        value_levels: list[float],
        key_norm: tuple[float, float] = (1.0, 0.0),
        value_norm: tuple[float, float] = (1.0, 0.0),
    ) -> None:
        """Start.

        Args:
            config: `bits`, `outliers` (a share of the channels), `center`.
            head_dim: Channels.
            offset: Middle of each key channel.
            range_: Half the width of each key channel.
            key_levels: 2^bits levels, ascending, in about -1 to 1.
            value_levels: The same for values.
            key_norm: Scale and shift by which a key's levels are read back (Q-Norm).
            value_norm: The same for values.
        """
        self.config = complete(DEFAULTS, config)
        self.outliers = max(1, round(self.config["outliers"] * head_dim)) if self.config["outliers"] else 0
        self.offset = [np.float32(x) for x in offset]
        self.range = [np.float32(x) for x in range_]
        self.key_levels = key_levels
        self.value_levels = value_levels
        self.key_norm = key_norm
        self.value_norm = value_norm
        self.margin = math.inf

    def fit(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Nothing depends on the sequence."""

    def code(self, key: Tensor, value: Tensor) -> Coded:
        """Codes of a token, and what is read back of its key and value."""
        key_codes, key_read = self._key(clipped(key))
        value_codes, value_read = self._value(clipped(value))
        return {"key": key_codes, "value": value_codes}, vector(key_read), vector(value_read)

    def _key(self, xs: list[np.float32]) -> tuple[list[float], list[np.float32]]:
        inner = [(x - o) / r for x, o, r in zip(xs, self.offset, self.range, strict=True)]
        order = descending([abs(float(x)) for x in inner])
        apart = set(order[: self.outliers])
        self._note_ties(xs, [float(x) for x in inner], order)
        codes = [nearest(x, self.key_levels) for x in inner]
        scale, shift = self.key_norm
        read = [np.float32(self.key_levels[code] * scale + shift) for code in codes]
        read = [x * r + o for x, o, r in zip(read, self.offset, self.range, strict=True)]
        return list(map(float, codes)), [half(x) if c in apart else read[c] for c, x in enumerate(xs)]

    def _note_ties(self, xs: list[np.float32], inner: list[float], order: list[int]) -> None:
        """Compare a key's outliers with ties of fp16, its other numbers with those of levels, and the two kinds."""
        size = float(max(abs(x) for x in xs))
        count = self.outliers
        if not size:
            return
        near = [half_tie(xs[c]) for c in order[:count]]
        edges = [(a + b) / 2 for a, b in pairwise(self.key_levels)]
        near += [abs(inner[c] - edge) * float(self.range[c]) for c in order[count:] for edge in edges]
        if 0 < count < len(order):
            last, first = order[count - 1 : count + 1]
            near += [(abs(inner[last]) - abs(inner[first])) * float(min(self.range[last], self.range[first]))]
        self.margin = min(self.margin, *(x / size for x in near))

    def _value(self, xs: list[np.float32]) -> tuple[list[float], list[np.float32]]:
        plain = [float(x) for x in xs]
        center = statistics.median_low(plain) if self.config["center"] == "median" else math.fsum(plain) / len(plain)
        apart = set(descending([abs(x - center) for x in plain])[: self.outliers])
        rest = [x for c, x in enumerate(xs) if c not in apart]
        low = min(rest)
        high = max(rest)
        offset = half((low + high) / np.float32(2))
        width = half((high - low) / np.float32(2))
        codes = [nearest((x - offset) / width, self.value_levels) if width else 0 for x in xs]
        scale, shift = self.value_norm
        read = [np.float32(self.value_levels[code] * scale + shift) * width + offset for code in codes]
        return list(map(float, codes)), [half(x) if c in apart else read[c] for c, x in enumerate(xs)]


def _pair(numbers: Tensor) -> tuple[float, float]:
    first, second = numbers.tolist()
    return first, second


def codec(config: Config, calibration: Books) -> Codec:
    """The codec as the engine sees it."""
    own = only(config, DEFAULTS)
    bits = config["bits"]

    def make(layer: int, head: int, dim: int, given: Given) -> Alone:
        have = calibration(layer)
        offset, width = (have[f"keys.{name}"].expand(head + 1, -1)[head].tolist() for name in ("offset", "range"))
        levels = [sorted(have[f"{side}.levels.b{bits}"].tolist()) for side in ("keys", "values")]
        norms = [_pair(have[f"{side}.norm.b{bits}"]) if config["norm"] else (1.0, 0.0) for side in ("keys", "values")]
        return Head(own, dim, offset, width, levels[0], levels[1], norms[0], norms[1])

    return lone(
        config, make, key_space="unrotated", pins="first" if config["sinks"] else "none", pinned=config["sinks"]
    )
