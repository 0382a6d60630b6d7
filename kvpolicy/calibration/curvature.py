"""Damped Newton steps for the atoms of a dictionary; the codes are constants."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.codecs.csr.pursuit import pursue
from kvpolicy.codecs.csr.sparse import Dictionary

_MEMORY = 0.97
"""Weight of the earlier batches in the running mean: about the last 33 count."""

_DAMPING = 0.3
"""Fraction of the diagonal that is added to it: codes change with the atoms, so a full step goes too far."""

_FLOOR = 1e-3
"""Fraction of the mean of the diagonal that is added besides: an atom that is never used has no curvature."""

_TINY = 1e-30


class Codes:
    """Vectors encoded with a dictionary.

    Attributes:
        index: Atoms, [n, k] int64.
        coef: Their coefficients, [n, k].
        residual: The vectors minus their encoded values, [n, d].
    """

    def __init__(self, x: Tensor, atoms: Tensor, pairs: int) -> None:
        """Encode the vectors [n, d] with the atoms [N, d] in `pairs` pairs by matching pursuit."""
        dictionary = Dictionary(atoms, atoms.new_zeros(1, 1, 0, atoms.shape[1]))
        self.index, self.coef = (t[0, 0] for t in pursue(x[None, None], dictionary, pairs))
        self.residual = x - (self.coef[..., None] * atoms[self.index]).sum(1)

    def gradient(self, count: int) -> Tensor:
        """Gradient of the mean squared norm of the residuals with respect to `count` atoms, [N, d]."""
        slopes = self.coef[..., None] * self.residual[:, None]  # [n, k, d]
        gradient = self.residual.new_zeros(count, self.residual.shape[1])
        return gradient.index_add_(0, self.index.flatten(), slopes.flatten(0, 1), alpha=-2 / len(self.residual))


class Curvature:
    """The second derivative of the error with respect to the atoms, as a running mean over batches.

    The error is the mean of ||x - C A||^2, with the coefficients C [n, N] and the atoms A [N, d]. Its second derivative
    is 2 C^T C / n for every channel: how often two atoms are used together, and how much. A plain gradient step
    corrects an error as often as atoms share it; this one corrects it once.

    Args:
        atoms: [N, d]; only its shape, type and device count.
    """

    def __init__(self, atoms: Tensor) -> None:
        """Start without any batch."""
        self._count = len(atoms)
        self._sum = atoms.new_zeros(self._count**2)
        self._batches = 0
        self._last = torch.zeros_like(atoms)

    def add(self, codes: Codes) -> None:
        """Take the codes of a batch into the mean."""
        places = codes.index[:, :, None] * self._count + codes.index[:, None]
        products = codes.coef[:, :, None] * codes.coef[:, None]
        share = 2 * (1 - _MEMORY) / len(codes.index)
        self._sum.mul_(_MEMORY).index_add_(0, places.flatten(), products.flatten(), alpha=share)
        self._batches += 1

    def mean(self) -> Tensor:
        """The mean over the batches so far, [N, N]."""
        return self._sum.view(self._count, self._count) / (1 - _MEMORY**self._batches)

    def solve(self, gradient: Tensor) -> Tensor:
        """The Newton step for a gradient [N, d]: approximately the damped curvature's inverse times it.

        It goes one step of steepest descent, scaled by the diagonal, from the solution before: the curvature of two
        batches is nearly the same, so that the solutions of many batches add up to a Newton step.
        """
        matrix = self.mean()
        diagonal = matrix.diagonal()
        # A view: this changes the diagonal of `matrix`, which `mean` has just made, and not that of the running sum.
        diagonal += _DAMPING * diagonal + (_FLOOR * diagonal.mean() + _TINY)
        rest = gradient - matrix @ self._last
        direction = rest / diagonal[:, None]
        length = (rest * direction).sum(0) / (direction * (matrix @ direction)).sum(0).clamp_min(_TINY)
        self._last = self._last + length * direction
        return self._last
