"""Few bits per number, plus a low rank of what that missed, plus the outliers as they are: X ~ Q + L + S."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..coding import Codec, Config, Given, Pair
from ..scalars import LARGEST_HALF, Frame, complete, decode, descending, encode, frame, half, largest_divisor
from ._common import Books, grouped, only, side_bits

DEFAULTS: Config = {
    "bits": 2,
    "key_bits": "auto",
    "value_bits": "auto",
    "group_size": 64,
    "rank": 2,
    "sparse": 0.02,
    "backbone": "kivi",
}
SMALL = "gear:bits=4:group_size=4:rank=0:residual_length=4"
"""The basis is anyone\'s, so that only without one GEAR can be compared number by number."""
LOOPS = 3
Array = NDArray[np.float32]


class Apart(NamedTuple):
    """A vector without its outliers: their places, and the numbers with the mean of the others in their place."""

    places: list[int]
    filled: list[np.float32]


def outliers(length: int, sparse: float) -> int:
    """How many of the largest, and of the smallest, numbers of a vector are kept."""
    return max(1, round(sparse / 2 * length)) if sparse else 0


def pull_out(xs: list[np.float32], each: int) -> Apart:
    """Take `each` of the largest and then of the smallest other numbers out of a vector; ties: the earlier one."""
    high = descending([float(x) for x in xs])[:each]
    rest = [j for j in range(len(xs)) if j not in high]
    low = sorted(rest, key=lambda j: (float(xs[j]), j))[:each]
    others = [float(xs[j]) for j in rest if j not in low]
    mean = np.float32(math.fsum(others) / len(others)) if others else np.float32(0)
    places = sorted([*high, *low])
    return Apart(places, [mean if j in places else x for j, x in enumerate(xs)])


def basis(error: Array, rank: int, seed: int = 0) -> Array:
    """An orthonormal basis [D, rank] of what is largest in the rows of `error` [n, D], by power iteration.

    Where there is less error than ranks, some of the basis is arbitrary, and of no use.
    """
    right = np.random.default_rng(seed).standard_normal((error.shape[1], rank))
    for _ in range(LOOPS):
        right = np.linalg.qr(error.astype(np.float64).T @ (error.astype(np.float64) @ right))[0]
    return halves(right.astype(np.float32))


def halves(x: Array) -> Array:
    """Every number as fp16 has it."""
    return np.array([[half(v) for v in row] for row in x], np.float32).reshape(x.shape)


def matrix(tokens: list[Tensor]) -> Array:
    """Tokens as rows; what is beyond fp16 is clipped first, since its outliers and frames are kept in fp16."""
    return np.clip(np.array([x.float().tolist() for x in tokens], np.float32), -LARGEST_HALF, LARGEST_HALF)


def error_beside(coded: Array, filled: Array, places: set[tuple[int, int]]) -> Array:
    """What the backbone missed, but for the outliers, which are known exactly."""
    error = filled - coded
    for t, c in places:
        error[t, c] = 0
    return error


class Head:
    """One group of tokens of one KV head."""

    def __init__(self, config: Config, head_dim: int) -> None:
        """Start without tokens."""
        self.config = complete(DEFAULTS, config)
        self.dim = head_dim
        whole = self.config["backbone"] == "kcvt"
        self.width = head_dim if whole else largest_divisor(head_dim, self.config["group_size"])
        self.key_frames: list[Frame] = []
        self.key_places: set[tuple[int, int]] = set()
        self.key_basis = np.zeros((head_dim, 0), np.float32)
        self.value_basis = np.zeros((head_dim, 0), np.float32)

    def fit_block(
        self, keys: list[Tensor], values: list[Tensor], slots: list[int] | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Code a new group of tokens and fix its parameters; what is read back of each key and value.

        Args:
            keys: At most `group_size`, [D].
            values: As many.
            slots: Where in the group each stands; in order, unless told.
        """
        key_rows = matrix(keys)
        value_rows = matrix(values)
        rank = min(self.config["rank"], self.dim)
        coded, places, filled = self._code_keys(key_rows)
        self.key_places = {(slots[t] if slots else t, c) for t, c in places}
        self.key_basis = basis(error_beside(coded, filled, places), rank)
        read_keys = self._finish(key_rows, coded, filled, self.key_basis, places)
        coded, places, filled = self._code_values(value_rows)
        self.value_basis = basis(error_beside(coded, filled, places), rank)
        read_values = self._finish(value_rows, coded, filled, self.value_basis, places)
        return list(zip(torch.from_numpy(read_keys), torch.from_numpy(read_values), strict=True))

    def overwrite(self, slot: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Code a token in place of another, with the group's frames and bases.

        The places of the slot's outliers stay; they take the new key's numbers.
        """
        row = matrix([key])
        places = {(0, c) for t, c in self.key_places if t == slot}
        coded = np.array([[self._key_stand_in(x, c) for c, x in enumerate(row[0])]], np.float32)
        read_key = self._finish(row, coded, row, self.key_basis, places)
        row = matrix([value])
        coded, places, filled = self._code_values(row)
        read_value = self._finish(row, coded, filled, self.value_basis, places)
        return torch.from_numpy(read_key[0]), torch.from_numpy(read_value[0])

    def _key_stand_in(self, x: np.float32, channel: int) -> np.float32:
        by = self.key_frames[channel]
        return decode(encode(np.float32(x), by, side_bits(self.config)[0]), by)

    def _code_keys(self, rows: Array) -> tuple[Array, set[tuple[int, int]], Array]:
        """The backbone of keys, a frame for each channel; where the outliers are; the keys without them."""
        each = outliers(self.config["group_size"], self.config["sparse"])
        apart = [pull_out([np.float32(x) for x in rows[:, c]], each) for c in range(self.dim)]
        self.key_frames = [frame(some.filled, side_bits(self.config)[0]) for some in apart]
        filled = np.array([some.filled for some in apart], np.float32).T
        coded = np.array([[self._key_stand_in(x, c) for c, x in enumerate(row)] for row in filled], np.float32)
        return coded, {(t, c) for c, some in enumerate(apart) for t in some.places}, filled

    def _code_values(self, rows: Array) -> tuple[Array, set[tuple[int, int]], Array]:
        """The backbone of values, frames for each token; where the outliers are; the values without them."""
        each = outliers(self.dim, self.config["sparse"])
        _, bits = side_bits(self.config)
        apart = [pull_out([np.float32(x) for x in row], each) for row in rows]
        coded: list[list[np.float32]] = []
        for some in apart:
            row: list[np.float32] = []
            for start in range(0, self.dim, self.width):
                part = some.filled[start : start + self.width]
                by = frame(part, bits)
                row += [decode(encode(x, by, bits), by) for x in part]
            coded.append(row)
        places = {(t, c) for t, some in enumerate(apart) for c in some.places}
        return np.array(coded, np.float32), places, np.array([some.filled for some in apart], np.float32)

    def _finish(self, rows: Array, coded: Array, filled: Array, by: Array, places: set[tuple[int, int]]) -> Array:
        """Q + L, and what was pulled out as it is."""
        read = coded + halves(np.asarray(error_beside(coded, filled, places) @ by, np.float32)) @ by.T
        for t, c in places:
            read[t, c] = half(rows[t, c])
        return read.astype(np.float32)


class Grouped:
    """GEAR's groups of slots; see `stages.Coder`."""

    def __init__(self, config: Config) -> None:
        """Start without groups."""
        self.config = config
        self.size = config["group_size"]
        self.groups: dict[int, Head] = {}

    def write(self, slots: list[int], tokens: list[Pair], live: list[bool], given: Given) -> list[Pair]:
        """Fit a group that has no live token, and overwrite slots of any other."""
        read: dict[int, Pair] = {}
        for group in {slot // self.size for slot in slots}:
            first = group * self.size
            some = {slot - first: pair for slot, pair in zip(slots, tokens, strict=True) if slot // self.size == group}
            some = dict(sorted(some.items()))
            if any(live[first : first + self.size]):
                pairs = [self.groups[group].overwrite(slot, *pair) for slot, pair in some.items()]
            else:
                self.groups[group] = Head(self.config, len(tokens[0][0]))
                pairs = self.groups[group].fit_block(
                    [k for k, _ in some.values()], [v for _, v in some.values()], [*some]
                )
            read |= {first + slot: pair for slot, pair in zip(some, pairs, strict=True)}
        return [read[slot] for slot in slots]


def codec(config: Config, calibration: Books) -> Codec:
    """The codec as the engine sees it."""
    return grouped(config, lambda: Grouped(only(config, DEFAULTS)))
