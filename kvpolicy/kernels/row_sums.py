"""Weighted sums of vectors that lie in some slots of a large buffer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.kernels.slot_writes import flat_slots

_MOST_BAGS = 4
"""Rows of weights up to which summing vectors where they are takes less time than copying them first."""


def sums_in_place(rows: int, vectors: Tensor) -> bool:
    """Whether `row_sums` suits `rows` rows of weights for each head of `vectors` [B, H, S, D]."""
    return rows <= _MOST_BAGS and vectors.device.type == "cpu" and vectors.dtype == torch.float32


def row_sums(weights: Tensor, vectors: Tensor, slots: Tensor) -> Tensor:
    """Add up weighted vectors of some slots, without a copy of them.

    Args:
        weights: [B, H, M, n] fp32.
        vectors: [B, H, S, D] fp32, contiguous.
        slots: Slots of the n weights of each head, [B, H, n] int64.

    Returns:
        [B, H, M, D] fp32.

    Examples:
        >>> row_sums(torch.ones(1, 1, 1, 2), torch.eye(3)[None, None], torch.tensor([[[2, 0]]]))
        tensor([[[[1., 0., 1.]]]])
    """
    batch, heads, size, dim = vectors.shape
    rows = weights.shape[2]
    bags = flat_slots(slots, size).view(batch * heads, 1, -1).expand(-1, rows, -1).flatten(0, 1)
    flat = vectors.view(batch * heads * size, dim)
    sums = F.embedding_bag(bags, flat, per_sample_weights=weights.flatten(0, 2), mode="sum")
    return sums.view(batch, heads, rows, dim)
