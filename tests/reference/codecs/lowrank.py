"""Coordinates along a few calibrated directions, and the vector that they stand for."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..coding import Codec, Config, Given
from ..scalars import LARGEST_HALF, Coded, complete, half, half_tie, vector
from ._common import Alone, Books, Calibration, lone, only

DEFAULTS: Config = {"rank": 2, "value_rank": 2, "basis": "keys", "key_space": "rotated"}
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
    """One KV head; nothing is fitted.

    Attributes:
        margin: How near a coordinate came to a tie of fp16, as a share of the largest number of its vector.
    """

    def __init__(self, keys: Side, values: Side) -> None:
        """Start, with the projections of keys and of values."""
        self.sides = keys, values
        self.margin = math.inf

    def fit(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Nothing depends on the sequence."""

    def code(self, key: Tensor, value: Tensor) -> Coded:
        """Coordinates of a token, and what is read back of its key and value."""
        key_codes, key_read = self._side(self.sides[0], key.double().tolist())
        value_codes, value_read = self._side(self.sides[1], value.double().tolist())
        return {"key": key_codes, "value": value_codes}, vector(key_read), vector(value_read)

    def _side(self, side: Side, xs: list[float]) -> tuple[list[float], list[np.float32]]:
        centered = [x - m for x, m in zip(xs, side.mean, strict=True)]
        sums = [min(max(dot(row, centered), -LARGEST_HALF), LARGEST_HALF) for row in side.encode]
        size = max(map(abs, xs), default=0.0)
        if size:
            self.margin = min(self.margin, *(half_tie(np.float32(x)) / size for x in sums))
        codes = [float(half(np.float32(x))) for x in sums]
        read = [
            m + math.fsum(c * row[d] for c, row in zip(codes, side.decode, strict=True))
            for d, m in enumerate(side.mean)
        ]
        return codes, [np.float32(x) for x in read]


def codec(config: Config, calibration: Books) -> Codec:
    """The codec as the engine sees it."""
    own = complete(DEFAULTS, only(config, DEFAULTS))
    part = {"rotated": "keys.post", "unrotated": "keys.pre"}[own["key_space"]]

    def make(layer: int, head: int, dim: int, given: Given) -> Alone:
        have = calibration(layer)
        rank = max(1, dim // 4) if own["rank"] == "auto" else own["rank"]
        value_rank = rank if own["value_rank"] == "auto" else own["value_rank"]
        first = directions(have, part, head)[:rank]
        of_keys = (first, first) if own["basis"] == "keys" else weighted(have, part, head, rank)
        of_values = directions(have, "values", head)[:value_rank]
        keys = Side(of_row(have, f"{part}.mean", head), *of_keys)
        return Head(keys, Side(of_row(have, "values.mean", head), of_values, of_values))

    return lone(config, make, key_space=own["key_space"])
