"""The text in the columns of a cache, as far as it is known: a digest of its mask, and token ids from a file.

The digest tells whether a later mask shows the same tokens. That of a row with the mask bits v_0 ... v_(n-1) is the sum
of v_i * M ** (n - 1 - i) in 64-bit integers with wrap-around. One more column costs a multiplication and an addition,
in place and without a host sync.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.text.errors import KVPolicyError

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


class KnownTokens(NamedTuple):
    """Token ids of the first columns of a cache.

    They are on the host, and in no tensor: they are no part of what the cache holds to attend to.

    Attributes:
        rows: The ids of each row, padding included.
    """

    rows: tuple[array[int], ...]

    @classmethod
    def of(cls, ids: Tensor) -> KnownTokens:
        """Those of a tensor, [B, N] int64."""
        return cls(tuple(array("q", row.tolist()) for row in ids))

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> KnownTokens:
        """Select or repeat rows, as `fn` does with tensors."""
        return KnownTokens(tuple(self.rows[row] for row in fn(torch.arange(len(self.rows), device="cpu")).tolist()))

    def first(self, columns: int) -> KnownTokens | None:
        """Those of at most the first columns; None if there are none."""
        return KnownTokens(tuple(row[:columns] for row in self.rows)) if columns else None

    def check(self, ids: Tensor, mask: Tensor | None) -> None:
        """Refuse a text that does not begin with these tokens.

        Args:
            ids: The text, [B, P], with at least as many columns, or one row for several ones that are alike.
            mask: Which of its columns are not padding, [B, P]; None if all are.

        Raises:
            KVPolicyError: Naming the first row and column that differs.
        """
        columns = len(self.rows[0])
        repeats = len(self.rows) // len(ids)
        if not columns or repeats * len(ids) != len(self.rows):
            return  # the forward refuses another number of rows
        text = ids[:, :columns].cpu()
        seen = torch.ones_like(text, dtype=torch.bool) if mask is None else mask[:, :columns].cpu().bool()
        ours = torch.tensor([row.tolist() for row in self.rows], device="cpu")
        other = (ours != text.repeat_interleave(repeats, 0)) & seen.repeat_interleave(repeats, 0)
        if bool(other.any()):
            row, column = (int(place) for place in other.nonzero()[0])
            raise KVPolicyError(
                f"The text must begin with the {columns} tokens that the cache's file has, got another one in row "
                f"{row} and column {column}: {int(text[row // repeats, column])} instead of {self.rows[row][column]}; "
                "try the text that the file was made of with more behind it, tokenized as one, or a new cache."
            )

    def __deepcopy__(self, memo: object) -> KnownTokens:
        """Copies of a cache share what never changes."""
        return self
