"""KVTC from its definition: principal components by eigenvectors, codes number by number, bits by trying everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Pair = tuple[int, int]
"""The size and the bits of a group."""


def components(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean [p], the eigenvectors of the covariance as columns [p, p], and its eigenvalues [p], falling; fp64."""
    rows = [row.double() for row in x]
    mean = sum(rows, torch.zeros(x.shape[1], dtype=torch.float64)) / len(rows)
    covariance = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64)
    for row in rows:
        covariance += torch.outer(row - mean, row - mean) / len(rows)
    values, vectors = torch.linalg.eigh(covariance)
    return mean, vectors.flip(-1), values.flip(-1)


def half(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float64).half())


def rounded(numbers: Sequence[float], bits: int) -> list[float]:
    """What the codes of one group of one token stand for."""
    low = min(numbers)
    levels = 2**bits - 1
    shift = half(low)
    scale = half((max(numbers) - low) / levels)
    found: list[float] = []
    for number in numbers:
        code = 0 if scale == 0 else round((number - shift) / scale)  # half to even
        found.append(shift + scale * min(max(code, 0), levels))
    return found


def decoded(latents: Sequence[float], groups: Sequence[Pair]) -> list[float]:
    """The components of one token that are left: those behind all groups are 0."""
    found: list[float] = []
    for size, bits in groups:
        own = latents[len(found) : len(found) + size]
        found += rounded(own, bits) if bits else [0.0] * size
    return found + [0.0] * (len(latents) - len(found))


def coded(x: Tensor, mean: Tensor, directions: Tensor, groups: Sequence[Pair]) -> Tensor:
    """What is left of vectors [n, p], fp64."""
    rows: list[Tensor] = []
    for row in x.double():
        latents = [float((row - mean) @ direction) for direction in directions.double().T]
        left = decoded(latents, groups)
        row = mean.double().clone()
        for number, direction in zip(left, directions.double().T, strict=True):
            row = row + number * direction
        rows.append(row)
    return torch.stack(rows) if rows else x.double()


def cost(groups: Sequence[Pair]) -> int:
    """Bits of a token: of codes, and 32 of shift and scale for each group that is not dropped."""
    return sum(size * bits + 32 for size, bits in groups if bits)


def error(latents: Tensor, groups: Sequence[Pair]) -> float:
    """The sum of squared errors over tokens [n, r]."""
    total = 0.0
    for row in latents.tolist():
        total += sum((one - other) ** 2 for one, other in zip(row, decoded(row, groups), strict=True))
    return total


def all_groups(width: int, sizes: Sequence[int], bits: Sequence[int]) -> Iterator[list[Pair]]:
    """Every way to cut `width` components into groups and single ones that are dropped."""
    if width == 0:
        yield []
        return
    for rest in all_groups(width - 1, sizes, bits):
        yield [(1, 0), *rest]
    for size in sizes:
        if size <= width:
            for rest in all_groups(width - size, sizes, bits):
                for each in bits:
                    yield [(size, each), *rest]


def least_error(latents: Tensor, budget: int, sizes: Sequence[int], bits: Sequence[int]) -> float:
    """The least error of all ways that fit the bits of a token."""
    every = all_groups(latents.shape[1], sizes, bits)
    return min(error(latents, groups) for groups in every if cost(groups) <= budget)


def is_coded(position: int, length: int, sinks: int, window: int) -> bool:
    """Whether a token is encoded: not among the first or the newest ones."""
    return sinks <= position < length - window
