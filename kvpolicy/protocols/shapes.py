"""The shape of one layer's keys."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LayerShape(NamedTuple):
    """The shape of one layer's keys and values on one rank.

    Attributes:
        heads: KV heads.
        head_dim: Head dimension.
        dtype: Dtype of keys and values.
        all_heads: KV heads on all ranks; 0 if this rank holds them all.
    """

    heads: int
    head_dim: int
    dtype: torch.dtype
    all_heads: int = 0

    @property
    def token_nbytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.heads * self.head_dim * self.dtype.itemsize
