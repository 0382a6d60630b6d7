"""The shape of one layer's keys."""

from __future__ import annotations

from typing import NamedTuple

import torch


class HeadShape(NamedTuple):
    """The shape of one KV head on one rank.

    Attributes:
        group: Query heads that share it.
        head_dim: Head dimension.
    """

    group: int
    head_dim: int


SMALLEST_HEAD = HeadShape(1, 1)
"""One query head, one channel: for a state of which only the slots matter."""


class LayerShape(NamedTuple):
    """The shape of one layer's keys and values on one rank.

    Attributes:
        heads: KV heads.
        head_dim: Head dimension.
        dtype: Dtype of keys and values.
        group: Query heads of each KV head.
        all_heads: KV heads on all ranks; 0 if this rank holds them all.
    """

    heads: int
    head_dim: int
    dtype: torch.dtype
    group: int = 1
    all_heads: int = 0

    @property
    def head(self) -> HeadShape:
        """The shape of one KV head."""
        return HeadShape(self.group, self.head_dim)

    @property
    def token_nbytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.heads * self.head_dim * self.dtype.itemsize
