"""KVarN, number by number: groups of tokens whose rows and columns were given equal deviations, then few bits."""

from __future__ import annotations

import functools
import math
import statistics
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..coding import Codec, Coder, Config, Given, Pair
from ..scalars import Frame, decode, encode, frame, half, half_tie, integer_tie, scalars, vector
from ._common import Books, grouped
from .rotate import Matrix, mixing, times, transposed

SMALL = "kvarn:group_size=4:iterations=3:sinks=2:residual_length=2"

Numbers = list[float]
Tile = list[Numbers]
"""Rows of numbers."""


class Balanced(NamedTuple):
    """Scales by which a tile has nearly the same deviation everywhere.

    Attributes:
        rows: What each row is divided by.
        columns: What each column is divided by.
        imbalance: Of the tile that was divided.
    """

    rows: Numbers
    columns: Numbers
    imbalance: float


def deviation(xs: Numbers) -> float:
    """The standard deviation of a sample; that of one number is 0."""
    return statistics.stdev(xs) if len(xs) > 1 else 0.0


def columns_of(tile: Tile) -> Tile:
    return [list(column) for column in zip(*tile, strict=True)]


def divided(tile: Tile, rows: Numbers, columns: Numbers) -> Tile:
    """Every number over the scale of its row and that of its column."""
    return [
        [x / row / column for x, column in zip(xs, columns, strict=True)] for xs, row in zip(tile, rows, strict=True)
    ]


def unevenness(deviations: Numbers) -> float:
    return max(deviations) / max(min(deviations), 1e-8)


def grown(log: float, xs: Numbers) -> float:
    """The logarithm of a scale after another division by the deviation of what it scales."""
    return min(max(log + math.log(min(max(deviation(xs), 1e-3), 1e3)), -0.3), 10.0)


def balanced(tile: Tile, iterations: int) -> Balanced:
    """Divide columns and rows by their deviations in turns, and take the scales of least imbalance, the last of equals.

    A round begins with the columns. Imbalances that differ by less than a billionth are equal.
    """
    rows = [0.0] * len(tile)
    columns = [0.0] * len(tile[0])

    def now() -> tuple[Numbers, Numbers, Tile]:
        scales = [math.exp(log) for log in rows], [math.exp(log) for log in columns]
        return *scales, divided(tile, *scales)

    def measured() -> Balanced:
        of_rows, of_columns, scaled = now()
        sides = ([deviation(xs) for xs in side] for side in (scaled, columns_of(scaled)))
        return Balanced(of_rows, of_columns, sum(map(unevenness, sides)))

    best = measured()
    for _ in range(iterations):
        columns = [grown(log, xs) for log, xs in zip(columns, columns_of(now()[2]), strict=True)]
        rows = [grown(log, xs) for log, xs in zip(rows, now()[2], strict=True)]
        found = measured()
        if found.imbalance <= best.imbalance * (1 + 1e-9):
            best = found
    return best


class Group(NamedTuple):
    """What the first tokens of a group fix.

    Attributes:
        frames: Scale and zero of each channel of a normalized key.
        unit: The scale of a later key whose deviation is one step.
        channels: What each channel of a value is divided by.
    """

    frames: list[Frame]
    unit: float
    channels: list[np.float32]


@functools.cache
def matrix_of(width: int) -> Matrix:
    """The transform of vectors of a width; those of keys and values may differ."""
    return mixing(width)


def mixed(x: Tensor) -> list[np.float32]:
    return times(scalars(x), matrix_of(x.shape[-1]))


def in_steps(key: list[np.float32], frames: list[Frame]) -> float:
    """The deviation of a key over its channels, each counted in steps."""
    return deviation([float(x) / float(by.scale) if by.scale else 0.0 for x, by in zip(key, frames, strict=True)])


def as_rows(xs: list[list[np.float32]]) -> Tile:
    return [[float(x) for x in row] for row in xs]


class Head:
    """One stage of one KV head.

    Attributes:
        margin: How near a number came to a tie, as a share of the largest number of its vector. Mixed channels are
            sums, which fp32 rounds by their order.
    """

    def __init__(self, config: Config) -> None:
        """Start without groups."""
        self.config = config
        self.size = config["group_size"]
        self.groups: dict[int, Group] = {}
        self.margin = math.inf

    def write(self, slots: list[int], tokens: list[Pair], live: list[bool], given: Given) -> list[Pair]:
        """See `stages.Coder`."""
        keys, values = ([mixed(pair[side]) for pair in tokens] for side in (0, 1))
        scales: dict[int, np.float32] = {}
        for number in {slot // self.size for slot in slots}:
            if not any(live[number * self.size : (number + 1) * self.size]):
                own = [j for j, slot in enumerate(slots) if slot // self.size == number]
                found = self._fit(number, [keys[j] for j in own], [values[j] for j in own])
                scales |= dict(zip(own, found, strict=True))
        return [
            (
                self._key(key, self.groups[slot // self.size], scales.get(j)),
                self._value(value, self.groups[slot // self.size]),
            )
            for j, (slot, key, value) in enumerate(zip(slots, keys, values, strict=True))
        ]

    def _fit(self, number: int, keys: list[list[np.float32]], values: list[list[np.float32]]) -> list[np.float32]:
        """Fix the scales of a group, and return those of its keys."""
        iterations = self.config["iterations"]
        # Tokens are the columns of keys, and the rows of values.
        exact = balanced(columns_of(as_rows(keys)), iterations).columns
        channels = balanced(as_rows(values), iterations).columns
        self._note([half_tie(scale) / scale for scale in (*exact, *channels)])
        scales = [half(np.float32(scale)) for scale in exact]
        normal = [[x / scale for x in key] for key, scale in zip(keys, scales, strict=True)]
        frames = [frame(list(column), self.config["key_bits"]) for column in zip(*normal, strict=True)]
        steps = math.fsum(in_steps(key, frames) for key in keys)
        unit = math.fsum(map(float, scales)) / steps if steps else 0.0
        self.groups[number] = Group(frames, float(np.float32(unit)), [half(np.float32(scale)) for scale in channels])
        for column, by in zip(zip(*normal, strict=True), frames, strict=True):
            self._note_frame(list(column), by, self.config["key_bits"])
        return scales

    def _key(self, key: list[np.float32], group: Group, scale: np.float32 | None) -> Tensor:
        """What is read back of a mixed key; one that comes later has no scale yet."""
        bits = self.config["key_bits"]
        if scale is None:
            later = min(max(in_steps(key, group.frames) * group.unit, math.exp(-0.3)), math.exp(10.0))
            self._note([half_tie(later) / later])
            scale = half(np.float32(later))
        normal = [x / scale for x in key]
        self._note_codes(normal, group.frames, bits)
        read = [decode(encode(x, by, bits), by) * scale for x, by in zip(normal, group.frames, strict=True)]
        return vector(times(read, transposed(matrix_of(len(read)))))

    def _value(self, value: list[np.float32], group: Group) -> Tensor:
        """What is read back of a mixed value."""
        bits = self.config["value_bits"]
        normal = [x / scale for x, scale in zip(value, group.channels, strict=True)]
        by = frame(normal, bits)
        self._note_frame(normal, by, bits)
        self._note_codes(normal, [by] * len(normal), bits)
        read = [decode(encode(x, by, bits), by) * scale for x, scale in zip(normal, group.channels, strict=True)]
        return vector(times(read, transposed(matrix_of(len(read)))))

    def _note_frame(self, xs: list[np.float32], by: Frame, bits: int) -> None:
        size = max(abs(float(x)) for x in xs)
        if size:
            step = (max(xs) - min(xs)) / np.float32(2**bits - 1)
            self._note([half_tie(step) / size, half_tie(min(xs)) / size])

    def _note_codes(self, xs: list[np.float32], frames: list[Frame], bits: int) -> None:
        size = max(abs(float(x)) for x in xs)
        near = [
            integer_tie((x - by.zero) / by.scale) * float(by.scale)
            for x, by in zip(xs, frames, strict=True)
            if by.scale
        ]
        self._note([tie / size for tie in near if size])

    def _note(self, ties: list[float]) -> None:
        self.margin = min([self.margin, *ties])


def codec(config: Config, calibration: Books) -> Codec:
    """The codec as the engine sees it."""

    def make() -> Coder:
        return Head(config)

    return grouped(config, make, pinned=config["sinks"])
