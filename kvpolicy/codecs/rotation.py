"""Orthogonal mixing of channels, for any head dimension.

The largest power of two that divides the dimension is mixed by a Hadamard matrix, the odd factor that remains by a
cosine transform (orthonormal DCT-II). Every channel is spread over all others, and norms do not change.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])

_constants: dict[tuple[Hashable, torch.device], Tensor] = {}


def constant(name: Hashable, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """A constant as fp32 on a device, the same object in every call.

    Call this in a function that is marked with `constant_result`, so that a compiled program holds the tensor as a
    constant.

    Args:
        name: The key of the constant.
        device: The device of the result.
        make: Creates the tensor on the CPU, so that its value is the same for all devices.
    """
    if (name, device) not in _constants:
        with torch.inference_mode(False), torch.no_grad():
            tensor = make().float().contiguous().to(device)
            # A Parameter, because the compiler treats the shapes of parameters as static. Of another tensor it would
            # make a dimension dynamic once that changes, and it cannot guard on the shape of a constant.
            _constants[name, device] = torch.nn.Parameter(tensor, requires_grad=False)
    return _constants[name, device]


def constant_result(fn: F) -> F:
    """Mark a function whose result a compiled program may hold, as `torch.compiler.assume_constant_result` does.

    That function imports the compiler, which takes longer than a whole plan. The mark is all that it sets.
    """
    vars(fn)["_dynamo_marked_constant"] = True
    return fn


def mix(x: Tensor, seed: int | None = None) -> Tensor:
    """Mix the last dimension.

    The order of every sum is fixed, whatever the other dimensions are; that of a matrix product depends on how many
    vectors there are. So the codes of a token, and what is decoded from them, do not depend on its batch.

    Args:
        x: [..., D] fp32.
        seed: Seed of the random signs that channels are multiplied by first; None for no signs.

    Returns:
        [..., D] fp32.

    >>> mix(torch.tensor([2.0, 0.0, 0.0, 0.0])).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    if seed is not None:
        x = x * _signs(operator.index(x.shape[-1]), operator.index(seed), x.device)
    odd = _odd_factor(x.shape[-1])
    return _transform(x, odd, _cosines(odd, x.device))


def unmix(y: Tensor, seed: int | None = None) -> Tensor:
    """Undo `mix` on the last dimension, [..., D] fp32; the order of every sum is fixed too.

    >>> unmix(mix(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), seed=1), seed=1).round().tolist()
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    """
    odd = _odd_factor(y.shape[-1])
    # The Hadamard matrix is symmetric, hence its own inverse; the cosine transform is inverted by its transpose.
    x = _transform(y, odd, _cosines(odd, y.device).T)
    return x if seed is None else x * _signs(operator.index(y.shape[-1]), operator.index(seed), y.device)


def mixing(width: int, seed: int | None, device: torch.device) -> Tensor:
    """The matrix M of `mix`, [width, width] fp32, so that `mix(x)` is about `x @ M.T` and `unmix(y)` about `y @ M`.

    Use it for many vectors at once if the result need not be bit-identical for any batch.
    """
    number = None if seed is None else operator.index(seed)  # a symbolic integer cannot be a cache key under tracing
    return _matrix(operator.index(width), number, device)


def _odd_factor(width: int) -> int:
    width = operator.index(width)
    # In two's complement, this is the largest power of two that divides the width.
    return width // (width & -width)


def _transform(x: Tensor, odd: int, cosines: Tensor) -> Tensor:
    """The Hadamard transform over the power of two, then the cosine transform over the odd factor."""
    power = operator.index(x.shape[-1]) // odd
    x = x.unflatten(-1, (power, odd))
    size = 1
    # Fast Walsh-Hadamard transform: each round replaces pairs of blocks of `size` channels by their sum and difference.
    while size < power:
        first, second = x.unflatten(-2, (-1, 2, size)).unbind(-3)
        x = torch.stack((first + second, first - second), -3).flatten(-4, -2)
        size *= 2
    x = x * power**-0.5
    if odd > 1:
        # A matrix product, written as a sum in a fixed order.
        terms = [x[..., i : i + 1] * cosines[:, i] for i in range(odd)]
        x = sum(terms[1:], terms[0])
    return x.flatten(-2)


@constant_result
def _matrix(width: int, seed: int | None, device: torch.device) -> Tensor:
    def make() -> Tensor:
        # The transform of the unit vectors, which are rows here, gives the columns of the matrix.
        eye = torch.eye(width, dtype=torch.float64, device="cpu")
        odd = _odd_factor(width)
        rows = _transform(eye, odd, _cosine_matrix(odd)).T
        return rows if seed is None else rows * _signs(width, seed, eye.device)

    return constant(("matrix", width, seed), device, make)


@constant_result
def _signs(width: int, seed: int, device: torch.device) -> Tensor:
    def make() -> Tensor:
        generator = torch.Generator("cpu").manual_seed(seed)
        return 1.0 - 2.0 * torch.randint(0, 2, (width,), generator=generator, device="cpu")

    return constant(("signs", width, seed), device, make)


@constant_result
def _cosines(odd: int, device: torch.device) -> Tensor:
    return constant(("cosines", odd), device, lambda: _cosine_matrix(odd))


def _cosine_matrix(size: int) -> Tensor:
    """The orthonormal DCT-II, [size, size] fp64; its rows are the frequencies."""
    step = torch.arange(size, dtype=torch.float64, device="cpu")
    rows = torch.cos(math.pi / size * (step + 0.5) * step[:, None]) * math.sqrt(2 / size)
    rows[0] = size**-0.5
    return rows
