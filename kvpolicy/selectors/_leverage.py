"""Statistical leverage of keys: how much of a direction is due to one key alone."""

from __future__ import annotations

import torch
from torch import Tensor

_TILE = 512
"""Keys that are taken at a time, so that only so many are in fp64."""


def key_leverage(keys: Tensor, counts: Tensor, width: int, regular: float, layer_idx: int) -> Tensor:
    """The leverage of keys that were projected at random, after their mean was subtracted, [B, H, N] fp64.

    Args:
        keys: [B, H, N, D].
        counts: Which of them take part, [B, H, N] bool; numbers of others mean nothing.
        width: To how many numbers a key is projected.
        regular: See `leverage`.
        layer_idx: Index of the layer, which determines the projection.
    """
    matrix = projection(keys.shape[-1], width, layer_idx).to(keys.device)
    parts = [*zip(keys.split(_TILE, 2), counts[..., None].split(_TILE, 2), strict=True)]
    # Keys that do not count may hold inf, and 0 * inf is NaN.
    total = sum(part.double().masked_fill(~some, 0).sum(2, keepdim=True) for part, some in parts)
    mean = total / counts.sum(-1).clamp_min(1)[..., None, None]

    def projected(part: Tensor, some: Tensor) -> Tensor:
        return (part.double() - mean).masked_fill_(~some, 0) @ matrix

    # Projected twice, because all projected keys would take more memory than the keys.
    squares = sum(_squares(projected(*part)) for part in parts)
    factor = _factor(squares, regular)  # pyright: ignore[reportArgumentType]  # there is at least one part
    return torch.cat([_shares(projected(*part), factor) for part in parts], -1)


def projection(dim: int, width: int, layer_idx: int) -> Tensor:
    """Normal random numbers of variance 1 / width, [dim, width] fp64: the same for a layer in every process.

    Examples:
        >>> torch.equal(projection(4, 2, 7), projection(4, 2, 7))
        True
    """
    generator = torch.Generator("cpu").manual_seed(layer_idx)
    return torch.randn(dim, width, generator=generator, dtype=torch.float64, device="cpu") / width**0.5


def leverage(vectors: Tensor, regular: float) -> Tensor:
    """The diagonal of X (X' X + regular I)^-1 X' for vectors X [..., N, K], [..., N] fp64.

    Examples:
        >>> leverage(torch.tensor([[3.0], [-3.0], [0.0]]), 2.0)
        tensor([0.4500, 0.4500, 0.0000], dtype=torch.float64)
    """
    vectors = vectors.double()
    return _shares(vectors, _factor(_squares(vectors), regular))


def _squares(vectors: Tensor) -> Tensor:
    return vectors.mT @ vectors


def _factor(squares: Tensor, regular: float) -> Tensor:
    """The Cholesky factor of X' X + regular I."""
    unit = torch.eye(squares.shape[-1], dtype=squares.dtype, device=squares.device)
    # Without a check, which would wait for the device: `regular` makes the matrix positive definite.
    return torch.linalg.cholesky_ex(squares + regular * unit).L


def _shares(vectors: Tensor, factor: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(factor, vectors.mT, upper=False).square().sum(-2)
