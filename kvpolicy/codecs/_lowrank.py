"""A low-rank basis of the quantization errors in a block of tokens.

All sums are elementwise products and reductions. The rounding of a matrix product depends on how many blocks there are,
and a row of a batch must have the same codes as on its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

ITERATIONS = 3
"""Rounds of power iteration."""

_DEPENDENT = 1e-5
"""A row of which less than this fraction is orthogonal to the rows before it counts as linearly dependent."""


def basis(error: Tensor, rank: int) -> Tensor:
    """Orthonormal rows that span most of the errors of each block, by power iteration from a fixed start.

    A row is zero if the errors of a block have a lower rank, for instance if they are all zero.

    Args:
        error: [..., n, D] fp32, zero for absent tokens.
        rank: The number of rows.

    Returns:
        [..., rank, D] fp32.

    >>> basis(torch.tensor([[0.0, 3.0], [0.0, -4.0]]), 1).abs().tolist()
    [[0.0, 1.0]]
    """
    # Scaled to 1, so that squares neither overflow nor vanish. The basis does not depend on the scale.
    unit = error / error.abs().amax((-1, -2), keepdim=True).clamp(min=1e-30)
    rows = [row.expand(*error.shape[:-2], -1) for row in _start(rank, error)]
    for _ in range(ITERATIONS):
        columns = orthonormal([(unit * row[..., None, :]).sum(-1) for row in rows])
        rows = [(unit * column[..., None]).sum(-2) for column in columns]
    return torch.stack(orthonormal(rows), -2)


def orthonormal(rows: list[Tensor]) -> list[Tensor]:
    """Orthonormalize rows [..., n] by the Gram-Schmidt process; a linearly dependent row becomes zero."""
    result: list[Tensor] = []
    for row in rows:
        before = row.norm(dim=-1, keepdim=True)
        # Twice, because rounding errors of the first pass are large if a row is nearly dependent.
        for other in result * 2:
            row = row - (row * other).sum(-1, keepdim=True) * other
        after = row.norm(dim=-1, keepdim=True)
        result.append(torch.where(after > _DEPENDENT * before, row / after.clamp(min=1e-30), 0))
    return result


def _start(rank: int, like: Tensor) -> list[Tensor]:
    """Pseudo-random numbers from -1 to 1 without a generator: the cubes of 1, 2, 3 and so on modulo a prime."""
    width = like.shape[-1]
    count = torch.arange(1, rank * width + 1, device=like.device)
    return list(((count**3 % 8191).to(like.dtype) / 4095 - 1).reshape(rank, width).unbind())
