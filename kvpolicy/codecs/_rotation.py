"""Orthogonal mixing of channels, for any head dimension.

The largest power of two that divides the dimension is mixed by a Hadamard matrix, the odd rest by a cosine transform
(orthonormal DCT-II): every channel is spread over all others, and no norm changes.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor

from kvpolicy.codecs._constants import kept


def mix(x: Tensor, seed: int | None = None) -> Tensor:
    """Mix the last dimension.

    Every sum is taken in one order, whatever the other dimensions are (a matrix product takes it in an order that
    depends on how many vectors there are). So a token's code, and what is read of it, do not depend on its batch.

    Args:
        x: [..., D] fp32.
        seed: Of the random signs that channels get first; None for none.

    Returns:
        [..., D] fp32.

    >>> mix(torch.tensor([2.0, 0.0, 0.0, 0.0])).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    if seed is not None:
        x = x * _signs(operator.index(x.shape[-1]), operator.index(seed), x.device)
    odd = _odd(x.shape[-1])
    return _mixed(x, odd, _cosines(odd, x.device))


def unmix(y: Tensor, seed: int | None = None) -> Tensor:
    """Undo `mix` on the last dimension, [..., D] fp32, with every sum in one order too.

    >>> unmix(mix(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), seed=1), seed=1).round().tolist()
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    """
    odd = _odd(y.shape[-1])
    x = _mixed(y, odd, _cosines(odd, y.device).T)
    return x if seed is None else x * _signs(operator.index(y.shape[-1]), operator.index(seed), y.device)


def mixing(width: int, seed: int | None, device: torch.device) -> Tensor:
    """The matrix M of `mix`, [width, width] fp32: `mix(x)` is about `x @ M.T`, and `unmix(y)` about `y @ M`.

    For many vectors at once, whose last bits do not matter.
    """
    number = None if seed is None else operator.index(seed)  # an index is no symbol while this is traced
    return _matrix(operator.index(width), number, device)


def _odd(width: int) -> int:
    width = operator.index(width)
    return width // (width & -width)


def _mixed(x: Tensor, odd: int, cosines: Tensor) -> Tensor:
    """Hadamard over the power of two, then the cosine transform over the odd factor."""
    power = operator.index(x.shape[-1]) // odd
    x = x.unflatten(-1, (power, odd))
    size = 1
    while size < power:
        first, second = x.unflatten(-2, (-1, 2, size)).unbind(-3)
        x = torch.stack((first + second, first - second), -3).flatten(-4, -2)
        size *= 2
    x = x * power**-0.5
    if odd > 1:
        terms = [x[..., i : i + 1] * cosines[:, i] for i in range(odd)]
        x = sum(terms[1:], terms[0])
    return x.flatten(-2)


@torch.compiler.assume_constant_result
def _matrix(width: int, seed: int | None, device: torch.device) -> Tensor:
    def make() -> Tensor:
        eye, odd = torch.eye(width, dtype=torch.float64, device="cpu"), _odd(width)
        rows = _mixed(eye, odd, _cosine_matrix(odd)).T
        return rows if seed is None else rows * _signs(width, seed, eye.device)

    return kept(("matrix", width, seed), device, make)


@torch.compiler.assume_constant_result
def _signs(width: int, seed: int, device: torch.device) -> Tensor:
    def make() -> Tensor:
        generator = torch.Generator("cpu").manual_seed(seed)
        return 1.0 - 2.0 * torch.randint(0, 2, (width,), generator=generator, device="cpu")

    return kept(("signs", width, seed), device, make)


@torch.compiler.assume_constant_result
def _cosines(odd: int, device: torch.device) -> Tensor:
    return kept(("cosines", odd), device, lambda: _cosine_matrix(odd))


def _cosine_matrix(size: int) -> Tensor:
    """The orthonormal DCT-II, [size, size] fp64; its rows are the frequencies."""
    step = torch.arange(size, dtype=torch.float64, device="cpu")
    rows = torch.cos(math.pi / size * (step + 0.5) * step[:, None]) * math.sqrt(2 / size)
    rows[0] = size**-0.5
    return rows
