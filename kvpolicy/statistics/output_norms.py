"""How much the values of tokens add to the residual stream: their norms behind the output projection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpolicy.statistics.statistic import Context, Sizes, Statistic, Working
from kvpolicy.statistics.windows import TILE_ELEMENTS


@dataclass(frozen=True)
class OutputNorms(Statistic[Tensor]):
    """The norms of the values of all candidates behind the output projection, [B, Hq, N] fp32.

    A norm is the sum of the absolute numbers that the value becomes behind the query head's slice of the projection.
    """

    reads_past: ClassVar[bool] = True
    reads_vectors: ClassVar[bool] = True
    along: ClassVar = "heads"
    words: ClassVar[str] = "how much the value of each token adds to the residual stream"

    def reduced(self, context: Context) -> Tensor:
        """The norms."""
        assert context.projection is not None
        return absolute_norms(context.all_values, context.projection())

    def working(self, sizes: Sizes) -> Working:
        """The norms of every query head, a slice of the projection and a tile of hidden vectors."""
        return Working(chosen=4 * (sizes.scores + TILE_ELEMENTS + sizes.hidden * sizes.head_dim))


def euclidean_norms(values: Tensor, projection: Tensor) -> Tensor:
    """Euclidean norm of each value behind each query head's slice of the output projection, [B, Hq, P] fp32.

    Args:
        values: [B, H, P, D].
        projection: [hidden, Hq * D], or one for each row, [B, hidden, Hq * D].
    """
    if projection.dim() == 3:
        return _by_row(euclidean_norms, values, projection)
    heads = values.shape[1]
    slices = _slices(projection, values.shape[3]).float()
    # |W v|^2 = v (W^T W) v: D x D numbers for each query head, in place of a hidden vector for each token and head.
    gram = (slices @ slices.mT).unflatten(0, (heads, -1))
    norms = [
        (torch.einsum("bhpd,hde->bhpe", values.float(), gram[:, g]) * values).sum(-1) for g in range(gram.shape[1])
    ]
    # Rounding may make the square of a small norm negative.
    return torch.stack(norms, 2).clamp_min(0).sqrt().flatten(1, 2)


def absolute_norms(values: Tensor, projection: Tensor) -> Tensor:
    """Sum of the absolute numbers of each value behind each query head's slice of it, [B, Hq, P] fp32.

    Args:
        values: [B, H, P, D]; infinite numbers and NaN give such norms.
        projection: [hidden, Hq * D], or one for each row, [B, hidden, Hq * D].
    """
    if projection.dim() == 3:
        return _by_row(absolute_norms, values, projection)
    batch, heads, columns, dim = values.shape
    slices = _slices(projection, dim)
    if not slices.shape[0]:  # a rank without heads, which takes part with one that no sum counts
        return values.new_zeros(batch, heads, columns, dtype=torch.float32)
    group = slices.shape[0] // heads
    norms = values.new_empty(batch, slices.shape[0], columns, dtype=torch.float32)
    # Of a hidden vector for each token, only a tile of tokens is alive.
    rows = max(TILE_ELEMENTS // (batch * slices.shape[2]), 16)
    for number, part in enumerate(slices):
        # Contiguous, as the values are: the sums must have the same bits on ranks, which hold a part of the weights.
        own = part.to(device=values.device, dtype=torch.float32).contiguous()
        for start in range(0, columns, rows):
            at = slice(start, start + rows)
            tile = values[:, number // group, at].float().contiguous()
            norms[:, number, at] = (tile @ own).abs_().sum(-1)
    return norms


def _by_row(norms: Callable[[Tensor, Tensor], Tensor], values: Tensor, projections: Tensor) -> Tensor:
    """The norms of each row's values behind its own projection."""
    return torch.cat([norms(row[None], own) for row, own in zip(values, projections, strict=True)])


def _slices(projection: Tensor, dim: int) -> Tensor:
    """Each query head's slice of the output projection, [Hq, D, hidden]."""
    return projection.unflatten(1, (-1, dim)).permute(1, 2, 0)
