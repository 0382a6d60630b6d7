"""What is largest in the errors of a block of tokens: a few rows that span it, and each token's part in them.

Sums, not matrix products: a product's rounding depends on how many blocks there are, and a batch must be its rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOOPS = 3
"""Rounds of power iteration."""

_DEPENDENT = 1e-5


def basis(error: Tensor, rank: int) -> Tensor:
    """Orthonormal rows that hold the most of each block's errors, by power iteration from a fixed start.

    A row is zero where a block has no such part, as where its errors are zero.

    Args:
        error: [..., n, D] fp32, zero for absent tokens.
        rank: How many rows.

    Returns:
        [..., rank, D] fp32.

    >>> basis(torch.tensor([[0.0, 3.0], [0.0, -4.0]]), 1).abs().tolist()
    [[0.0, 1.0]]
    """
    unit = error / error.abs().amax((-1, -2), keepdim=True).clamp(min=1e-30)  # neither large nor small squares
    rows = [row.expand(*error.shape[:-2], -1) for row in _start(rank, error)]
    for _ in range(LOOPS):
        columns = orthonormal([(unit * row[..., None, :]).sum(-1) for row in rows])
        rows = [(unit * column[..., None]).sum(-2) for column in columns]
    return torch.stack(orthonormal(rows), -2)


def orthonormal(rows: list[Tensor]) -> list[Tensor]:
    """Rows [..., n] of length one, orthogonal to each other; zero where a row depends on those before it."""
    found: list[Tensor] = []
    for row in rows:
        before = row.norm(dim=-1, keepdim=True)
        for other in found * 2:  # once leaves the rounding of large parts
            row = row - (row * other).sum(-1, keepdim=True) * other
        after = row.norm(dim=-1, keepdim=True)
        found.append(torch.where(after > _DEPENDENT * before, row / after.clamp(min=1e-30), 0))
    return found


def _start(rank: int, like: Tensor) -> list[Tensor]:
    """Numbers without a pattern, from -1 to 1: the cubes of 1, 2, 3... by a prime."""
    width = like.shape[-1]
    count = torch.arange(1, rank * width + 1, device=like.device)
    return list(((count**3 % 8191) / 4095 - 1).to(like.dtype).reshape(rank, width).unbind())
