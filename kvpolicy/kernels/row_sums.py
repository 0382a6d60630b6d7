"""Weighted sums of vectors that lie in some slots of a large buffer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.kernels.slot_writes import flat_slots

_MOST_BAGS = 4
"""Rows of weights up to which summing vectors where they are takes less time than copying them first."""


def sums_in_place(rows: int, vectors: Tensor) -> bool:
    """Whether `row_sums` suits `rows` rows of weights for each head of `vectors` [B, H, S, D]."""
    return rows <= _MOST_BAGS and vectors.device.type == "cpu" and vectors.dtype == torch.float32


def row_sums(
    weights: Tensor,
    vectors: Tensor,
    slots: Tensor,
    index: Tensor | None = None,
    once: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Add up weighted vectors of some slots, without a copy of them.

    Args:
        weights: [B, H, M, n] fp32.
        vectors: [B, H, S, D] fp32, contiguous.
        slots: Slots of the n weights of each head, [B, H, n] int64.
        index: `flat_slots` of the slots, if it is known.
        once: Knows where bags begin, if it is given; see `kvpolicy.protocols.StepMemo`.

    Returns:
        [B, H, M, D] fp32.

    Examples:
        >>> row_sums(torch.ones(1, 1, 1, 2), torch.eye(3)[None, None], torch.tensor([[[2, 0]]]))
        tensor([[[[1., 0., 1.]]]])
    """
    batch, heads, size, dim = vectors.shape
    rows = weights.shape[2]
    index = flat_slots(slots, size) if index is None else index
    bags = index.view(batch * heads, 1, -1).expand(-1, rows, -1).flatten()
    flat = vectors.view(batch * heads * size, dim)
    arange = torch.arange if once is None else partial(once, torch.arange)
    starts = arange(0, bags.numel(), slots.shape[-1], device=bags.device)
    sums = F.embedding_bag(bags, flat, starts, per_sample_weights=weights.flatten(), mode="sum")
    return sums.view(batch, heads, rows, dim)
