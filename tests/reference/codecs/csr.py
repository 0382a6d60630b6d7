"""Each vector as a few atoms of a dictionary and their coefficients."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..coding import Codec, Config, Given
from ..scalars import Coded, complete, descending, e4m3, half
from ._common import Alone, Books, lone, only

DEFAULTS: Config = {"nnz": 8, "value_chunks": 2, "solver": "mp", "coef": "fp16", "outlier_atoms": 0}
SMALL = "csr:nnz=4:prompt_atoms=2:residual_length=1:block_size=4:dictionary=FOLDER/csr"
Array = NDArray[np.float64]
Atoms = list[Array]


def unit(x: Array) -> Array:
    """A vector of norm 1 in the same direction; a zero vector stays one and is never chosen."""
    norm = math.sqrt(float(x @ x))
    return x / norm if norm else x


def best(residual: Array, atoms: Atoms) -> int:
    """The atom whose product is largest, whatever its sign; of equal ones the first."""
    worth = [abs(float(atom @ residual)) for atom in atoms]
    return worth.index(max(worth))


def matching_pursuit(x: Array, atoms: Atoms, pairs: int) -> tuple[list[int], list[float]]:
    """Take away the best atom, again and again; the same one may come twice."""
    residual = x.copy()
    chosen = list[int]()
    coefficients = list[float]()
    for _ in range(pairs):
        index = best(residual, atoms)
        c = float(atoms[index] @ residual)
        residual = residual - c * atoms[index]
        chosen.append(index)
        coefficients.append(c)
    return chosen, coefficients


def least_squares(x: Array, atoms: Atoms, chosen: list[int]) -> list[float]:
    """The best coefficients of the chosen atoms; those chosen twice share theirs."""
    solution = np.linalg.lstsq(np.stack([atoms[i] for i in chosen], 1), x, rcond=1e-9)[0]
    return [float(c) for c in solution]


def orthogonal_matching_pursuit(x: Array, atoms: Atoms, pairs: int) -> tuple[list[int], list[float]]:
    """Add the atom that best explains what all before leave over, and solve for all again."""
    residual = x.copy()
    chosen = list[int]()
    coefficients = list[float]()
    for _ in range(pairs):
        chosen.append(best(residual, atoms))
        coefficients = least_squares(x, atoms, chosen)
        residual = x - sum(c * atoms[i] for i, c in zip(chosen, coefficients, strict=True))
    return chosen, coefficients


def pursue(x: Array, atoms: Atoms, pairs: int, solver: str) -> tuple[list[int], list[float]]:
    """Atoms and coefficients of a vector."""
    if solver == "omp":
        return orthogonal_matching_pursuit(x, atoms, pairs)
    chosen, coefficients = matching_pursuit(x, atoms, pairs)
    return chosen, least_squares(x, atoms, chosen) if solver == "refit" else coefficients


def build(chosen: list[int], coefficients: list[float], atoms: Atoms) -> Array:
    """The sum of the chosen atoms, duplicates included."""
    total = np.zeros_like(atoms[0])
    for i, c in zip(chosen, coefficients, strict=True):
        total = total + c * atoms[i]
    return total


def left_over(x: Array, atoms: Atoms, pairs: int) -> float:
    """Share of a vector's norm that matching pursuit leaves over."""
    norm = math.sqrt(float(x @ x))
    rest = x - build(*matching_pursuit(x, atoms, pairs), atoms)
    return math.sqrt(float(rest @ rest)) / norm if norm else 0.0


class Side:
    """Keys or values of one KV head: its own dictionary, and into how many parts a vector is cut."""

    def __init__(self, atoms: list[Tensor], prompt: list[Tensor], parts: int, config: Config) -> None:
        """Start.

        Args:
            atoms: The offline dictionary's atoms [D / parts], of norm 1.
            prompt: Vectors [D] of this head and of the prompt, which become atoms, part after part.
            parts: Into how many parts a vector is cut.
            config: The codec's parameters.
        """
        self.parts = parts
        self.config = config
        self.scale = 1.0
        self.pairs = config["nnz"] // parts
        self.atoms: Atoms = [np.array(atom.double().tolist()) for atom in atoms]
        self.atoms += [unit(part) for x in prompt for part in self.cut(x)]
        self.fixed = len(self.atoms)

    def cut(self, x: Tensor) -> list[Array]:
        """The parts of a vector, in the order of its channels."""
        xs = x.float().double().tolist()
        width = len(xs) // self.parts
        return [np.array(xs[start : start + width]) for start in range(0, len(xs), width)]

    def add_outliers(self, tokens: list[Tensor], count: int) -> None:
        """Make atoms of the `count` parts that are coded worst, instead of earlier ones; ties: the earlier part.

        Directions are kept in fp16; the atoms, as all others, have the norm 1.
        """
        self.atoms = self.atoms[: self.fixed]
        parts = [part for token in tokens for part in self.cut(token)]
        worst = descending([left_over(part, self.atoms, self.pairs) for part in parts])[:count]
        self.atoms += [unit(np.array([float(half(v)) for v in unit(parts[j])])) for j in worst]

    def scale_to(self, tokens: list[Tensor]) -> None:
        """Let the largest coefficient be the largest number of fp8."""
        if self.config["coef"] == "fp8":
            largest = max(abs(c) for token in tokens for part in self.cut(token) for c in self.pursue(part)[1])
            self.scale = max(float(half(largest / 448)), 2.0**-24)  # the least of fp16

    def pursue(self, part: Array) -> tuple[list[int], list[float]]:
        """Atoms and coefficients of a part."""
        return pursue(part, self.atoms, self.pairs, self.config["solver"])

    def stored(self, c: float) -> float:
        """A coefficient as it is stored."""
        return float(half(c)) if self.config["coef"] == "fp16" else e4m3(c / self.scale) * self.scale

    def code(self, x: Tensor) -> tuple[list[int], list[float], Tensor]:
        """Atoms, coefficients and what is read back of a vector."""
        indices = list[int]()
        coefficients = list[float]()
        read = list[float]()
        for part in self.cut(x):
            chosen, exact = self.pursue(part)
            some = [self.stored(c) for c in exact]
            indices += chosen
            coefficients += some
            read += build(chosen, some, self.atoms).tolist()
        return indices, coefficients, torch.tensor(read, dtype=torch.float32)


class Head:
    """One KV head: the dictionaries of its keys and values."""

    def __init__(
        self,
        config: Config,
        head_dim: int,
        key_atoms: list[Tensor],
        value_atoms: list[Tensor],
        prompt_keys: list[Tensor],
        prompt_values: list[Tensor],
    ) -> None:
        """Start with the offline atoms, then those of the prompt.

        Args:
            config: `nnz` pairs for each vector, `value_chunks` parts of a value, `solver`, `coef`, `outlier_atoms`.
            head_dim: Channels.
            key_atoms: Offline atoms [D], of norm 1.
            value_atoms: Offline atoms [D / value_chunks], of norm 1.
            prompt_keys: Keys [D] of this head that become atoms.
            prompt_values: Values [D] of this head whose parts become atoms.
        """
        self.config = complete(DEFAULTS, config)
        self.keys = Side(key_atoms, prompt_keys, 1, self.config)
        self.values = Side(value_atoms, prompt_values, self.config["value_chunks"], self.config)

    def fit(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Take outlier atoms, and then the scale of the coefficients, from the tokens that an empty head is given."""
        for side, tokens in ((self.keys, keys), (self.values, values)):
            side.add_outliers(tokens, self.config["outlier_atoms"])
            side.scale_to(tokens)

    def code(self, key: Tensor, value: Tensor) -> Coded:
        """Codes of a token, and what is read back of its key and value."""
        key_index, key_coef, key_read = self.keys.code(key)
        value_index, value_coef, value_read = self.values.code(value)
        codes = {"key_index": list(map(float, key_index)), "key_coef": key_coef}
        return codes | {"value_index": list(map(float, value_index)), "value_coef": value_coef}, key_read, value_read


def codec(config: Config, calibration: Books) -> Codec:
    """The codec as the engine sees it."""
    own = only(config, DEFAULTS)

    def make(layer: int, head: int, dim: int, given: Given) -> Alone:
        space = {"unrotated": "pre", "rotated": "post"}[config["key_space"]]
        names = f"keys.{space}", f"values.sn{config['value_chunks']}"
        offline = [[atom / atom.norm() for atom in calibration(layer)[name].float().T] for name in names]
        prompt = [[*side] for side in given.own or ((), ())]
        return Head(own, dim, *offline, *prompt)

    assert not config["read_top_k"], "the reference attends to all"
    pinned = config["prompt_atoms"]
    return lone(
        config,
        make,
        key_space=config["key_space"],
        pins="newest" if pinned else "none",
        pinned=pinned,
    )
