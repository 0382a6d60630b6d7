"""A digest of the attention mask of every row, which tells whether a later mask shows the same tokens.

The digest of a row with the mask bits v_0 ... v_(n-1) is the sum of v_i * M ** (n - 1 - i) in 64-bit integers with
wrap-around. One more column costs a multiplication and an addition, in place and without a host sync.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIER = 6364136223846793005
"""Knuth's multiplier for 64-bit linear congruential generators."""


def extend_digest(digest: Tensor, valid: Tensor | None, columns: int) -> None:
    """Add columns to a digest, in place.

    Args:
        digest: [B] int64.
        valid: Which of the new columns are not padding, [B, P] bool; None if all are.
        columns: P.

    Examples:
        >>> digest = torch.zeros(1, dtype=torch.int64)
        >>> extend_digest(digest, torch.tensor([[False, True]]), 2)
        >>> extend_digest(digest, None, 1)
        >>> torch.equal(digest, mask_digest(torch.tensor([[0, 1, 1]])))
        True
    """
    if columns == 1:
        digest.mul_(MULTIPLIER).add_(1 if valid is None else valid[:, 0].long())
        return
    # PyTorch takes no integer beyond int64, and the product of the wrapped factor has the same low 64 bits.
    digest.mul_(_wrapped(pow(MULTIPLIER, columns, 2**64)))
    mask = torch.ones(1, columns, dtype=torch.int64, device=digest.device) if valid is None else valid
    digest.add_(mask_digest(mask))


def remove_from_digest(digest: Tensor, columns: int) -> None:
    """Take the last columns, none of which is padding, from a digest, in place.

    Args:
        digest: [B] int64.
        columns: How many.

    Examples:
        >>> digest = mask_digest(torch.tensor([[0, 1, 1, 1]]))
        >>> remove_from_digest(digest, 2)
        >>> torch.equal(digest, mask_digest(torch.tensor([[0, 1]])))
        True
    """
    digest.sub_(mask_digest(torch.ones(1, columns, device=digest.device, dtype=torch.float32)))
    # The multiplier is odd, so that it has an inverse in 64-bit integers.
    digest.mul_(_wrapped(pow(MULTIPLIER, -columns, 2**64)))


def mask_digest(mask: Tensor) -> Tensor:
    """The digest of a mask [B, N], [B] int64."""
    factors = torch.full((mask.shape[1],), MULTIPLIER, dtype=torch.int64, device=mask.device)
    factors[:1] = 1
    return (mask.bool() * factors.cumprod(0).flip(0)).sum(-1)


def _wrapped(number: int) -> int:
    """An unsigned 64-bit integer as the signed one with the same bits."""
    return number - 2**64 if number >= 2**63 else number
