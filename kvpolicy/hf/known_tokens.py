"""Token ids that a cache has seen, where a file told them, and their comparison with a text that goes on from there."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.text.errors import KVPolicyError


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
