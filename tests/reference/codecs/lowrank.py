"""Coordinates along a few calibrated directions, and the vector that they stand for."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..coding import Codec, Coder, Config, Given, Pair
from ..scalars import LARGEST_HALF, half_tie, vector
from ._common import Books, Calibration, wrapped
from .think import Halves

SMALL = "lowrank:rank=3:value_rank=5:residual_length=2:block_size=3:calibration=FOLDER/lowrank"

Matrix = list[list[float]]
"""Rows of numbers."""


class Side(NamedTuple):
    """How the vectors of one side are projected.

    Attributes:
        mean: [D].
        encode: A direction in each row, [r, D]: a coordinate is its product with a vector less the mean.
        decode: What each coordinate is multiplied by, [r, D].
    """

    mean: list[float]
    encode: Matrix
    decode: Matrix


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def orthonormal(columns: Matrix) -> Matrix:
    """Directions that were rounded, made orthonormal one after another (Gram and Schmidt)."""
    found: Matrix = []
    for column in columns:
        rest = column
        for _ in range(2):  # the second pass takes away what the first one rounded
            for other in found:
                share = dot(rest, other)
                rest = [x - share * y for x, y in zip(rest, other, strict=True)]
        length = math.sqrt(dot(rest, rest))
        found.append([x / length for x in rest])
    return found


def directions(have: Calibration, part: str, head: int) -> Matrix:
    """The directions of a part, the first one first."""
    basis = have[f"{part}.basis"]
    return orthonormal(basis[min(head, len(basis) - 1)].double().T.tolist())


def of_row(have: Calibration, name: str, head: int) -> list[float]:
    numbers = have[name]
    return numbers[min(head, len(numbers) - 1)].double().tolist()


def weighted(have: Calibration, part: str, head: int, rank: int) -> tuple[Matrix, Matrix]:
    """Directions of least error in products with queries, by the definition.

    With R the root of the second moment of queries, keys are projected in the coordinates R k.
    """

    def moment(name: str) -> np.ndarray:
        rows = np.array(directions(have, name, head))
        return rows.T @ np.diag(of_row(have, f"{name}.energy", head)) @ rows

    values, vectors = np.linalg.eigh(moment("queries"))
    root = vectors @ np.diag(np.sqrt(values)) @ vectors.T
    _, own = np.linalg.eigh(root @ moment(part) @ root)
    first = own[:, ::-1][:, :rank].T
    return (first @ root).tolist(), (first @ np.linalg.inv(root)).tolist()


class Head:
    """One KV head: its projections, and what codes coordinates of keys and of values.

    Attributes:
        margin: How near a coordinate came to a tie of fp16, as a share of the largest one of its vector, or what the
            coders say of theirs.
    """

    def __init__(self, keys: Side, values: Side, coders: tuple[Coder, Coder]) -> None:
        """Start; the coders code pairs of one side, of which the other half is not read."""
        self.sides = (keys, values)
        self.coders = coders
        self.margin = math.inf

    def write(self, slots: list[int], tokens: list[Pair], live: list[bool], given: Given) -> list[Pair]:
        """See `stages.Coder`."""
        found: list[list[Tensor]] = []
        for number, (side, coder) in enumerate(zip(self.sides, self.coders, strict=True)):
            sums = [self._coordinates(side, token[number], isinstance(coder, Halves)) for token in tokens]
            pairs = coder.write(slots, [(x, x) for x in sums], live, given)
            self.margin = min(self.margin, getattr(coder, "margin", math.inf))
            found.append([decoded(side, pair[number]) for pair in pairs])
        return [*zip(*found, strict=True)]

    def _coordinates(self, side: Side, x: Tensor, is_rounded: bool) -> Tensor:
        centered = [a - m for a, m in zip(x.double().tolist(), side.mean, strict=True)]
        sums = [dot(row, centered) for row in side.encode]
        if is_rounded and any(sums):
            size = max(map(abs, sums))
            near = [half_tie(np.float32(min(max(c, -LARGEST_HALF), LARGEST_HALF))) / size for c in sums]
            self.margin = min(self.margin, *near)
        return vector([np.float32(c) for c in sums])


def decoded(side: Side, coordinates: Tensor) -> Tensor:
    """The vector that coordinates stand for."""
    columns = zip(side.mean, zip(*side.decode, strict=True), strict=True)
    return vector([np.float32(m + dot(coordinates.tolist(), [*column])) for m, column in columns])


def codec(config: Config, calibration: Books) -> Codec:
    """The codec as the engine sees it."""
    part = {"rotated": "keys.post", "unrotated": "keys.pre"}[config["key_space"]]

    def wrap(layer: int, head: int, of_keys: Coder | None, of_values: Coder | None) -> Coder:
        have = calibration(layer)
        dim = have["values.basis"].shape[-1]
        rank = max(1, dim // 2) if config["rank"] == "auto" else config["rank"]
        value_rank = rank if config["value_rank"] == "auto" else config["value_rank"]
        first = directions(have, part, head)[:rank]
        encode, decode = (first, first) if config["basis"] == "keys" else weighted(have, part, head, rank)
        second = directions(have, "values", head)[:value_rank]
        keys = Side(of_row(have, f"{part}.mean", head), encode, decode)
        values = Side(of_row(have, "values.mean", head), second, second)
        return Head(keys, values, (of_keys or Halves(), of_values or Halves()))

    return wrapped(config, calibration, wrap, key_space=config["key_space"])
