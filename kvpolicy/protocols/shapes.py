"""The shape of one layer's keys."""

from __future__ import annotations

from typing import NamedTuple

import torch


class HeadShape(NamedTuple):
    """The shape of one KV head on one rank.

    Attributes:
        group: Query heads that share it.
        head_dim: Size of a key.
        value_dim: Size of a value as selectors see it, also where it is a part of its key; None if it is that of a key.
    """

    group: int
    head_dim: int
    value_dim: int | None = None

    @property
    def value_size(self) -> int:
        """Size of a value as selectors see it."""
        return self.value_dim or self.head_dim


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
        value_dim: Size of a value that is held; None if it is that of a key, 0 if none is held.
        latent: How many numbers of a key are its value, the first ones, where no value is held (latent attention); else
            0.
    """

    heads: int
    head_dim: int
    dtype: torch.dtype
    group: int = 1
    all_heads: int = 0
    value_dim: int | None = None
    latent: int = 0

    @property
    def held_value_dim(self) -> int:
        """Size of a value that is held; 0 if none is."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def head(self) -> HeadShape:
        """The shape of one KV head."""
        return HeadShape(self.group, self.head_dim, self.latent or self.value_dim)

    @property
    def token_nbytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return self.heads * (self.head_dim + self.held_value_dim) * self.dtype.itemsize
