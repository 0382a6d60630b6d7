"""Vectors that attention mixes where no values are held: latent attention reads a part of each key as its value."""

from __future__ import annotations

from torch import Tensor


def mixed_values(keys: Tensor, values: Tensor) -> Tensor:
    """The vectors that attention weights are applied to: values, or whole keys where no values are held.

    Whole keys, since a part of them would be a copy, or a view that few kernels read without one; what is behind their
    value is cut from the output.

    Args:
        keys: [..., N, D].
        values: [..., N, D'], D' = 0 where none are held.
    """
    return values if values.shape[-1] else keys


def read_values(keys: Tensor, values: Tensor, latent: int) -> Tensor:
    """The values of tokens, as they are or as the first `latent` numbers of their keys, where none are held.

    Args:
        keys: [..., N, D].
        values: [..., N, D'], D' = 0 where none are held.
        latent: See `LayerShape`.
    """
    return keys[..., :latent] if latent else values
