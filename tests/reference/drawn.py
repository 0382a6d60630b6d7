"""Tokens to code, and how far from them is what was read back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

D = 128


def noise(count: int, dim: int = D, seed: int = 0) -> list[Tensor]:
    return list(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)))


def channels(count: int, dim: int = D) -> list[Tensor]:
    """Tokens of which every channel has a spread and an offset of its own."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.rand(dim, generator=generator) * 4 + 0.2
    offset = torch.randn(dim, generator=generator) * 5
    return [x * spread + offset for x in noise(count, dim)]


def nmse(read: list[Tensor], xs: list[Tensor]) -> float:
    """Squared error over variance, each channel on its own scale."""
    given = torch.stack(xs).double()
    got = torch.stack(read).double()
    return float(((got - given) ** 2).mean(0).div(given.var(0, correction=0)).mean())


def share(read: list[Tensor], xs: list[Tensor]) -> float:
    """Squared error over the sum of squares."""
    given = torch.stack(xs).double()
    got = torch.stack(read).double()
    return float(((got - given) ** 2).sum() / (given**2).sum())


def reads(head: Any, keys: list[Tensor], values: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    head.fit(keys, values)
    coded = [head.code(key, value) for key, value in zip(keys, values, strict=True)]
    return [key for _, key, _ in coded], [value for _, _, value in coded]
