"""Rotary embeddings that rotate the halves of a key by constant frequencies, in one pass over the keys."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_halves(keys: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Rotate channel i of each key with channel i + D / 2.

    Args:
        keys: [B, H, n, D].
        positions: [B, H, n], integers.
        frequencies: Radians per position, [1, 1, 1, D / 2] fp32.

    Returns:
        [B, H, n, D] fp32.
    """
    angles = positions[..., None].float() * frequencies
    cos = angles.cos()
    sin = angles.sin()
    first, second = keys.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
