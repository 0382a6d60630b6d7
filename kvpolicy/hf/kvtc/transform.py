"""Principal components of vectors: the directions in which they vary most."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Components(NamedTuple):
    """The principal components of vectors of p numbers.

    Attributes:
        mean: [p] fp32.
        directions: Orthonormal columns of falling variance, [p, r] fp32.
    """

    mean: Tensor
    directions: Tensor

    def latents(self, x: Tensor) -> Tensor:
        """The coordinates of vectors [n, p] along the directions, [n, r] fp64."""
        # In fp64, so that rounding to codes does not depend on how many tokens are multiplied at once.
        return (x.double() - self.mean.to(x.device)) @ self.directions.to(x.device).double()

    def vectors(self, latents: Tensor) -> Tensor:
        """The vectors [n, p] fp32 of the first coordinates [n, s]; the others are 0."""
        directions = self.directions[:, : latents.shape[1]].to(latents.device)
        return latents.float() @ directions.mT + self.mean.to(latents.device)


def principal_components(x: Tensor, rank: int | None = None) -> Components:
    """The principal components of vectors.

    Args:
        x: [n, p].
        rank: The most directions; as many as there can be by default, at most n and p.

    Examples:
        >>> found = principal_components(torch.tensor([[3.0, 1.0], [-3.0, 1.0], [0.0, 1.0]]), 1)
        >>> found.mean.tolist(), found.directions.abs().tolist()
        ([0.0, 1.0], [[1.0], [0.0]])
    """
    centered = x.double()
    mean = centered.mean(0)
    centered = centered - mean
    tokens, width = centered.shape
    most = min(tokens, width) if rank is None else min(tokens, width, rank)
    if width <= tokens:
        directions = torch.linalg.eigh(centered.mT @ centered).eigenvectors.flip(-1)
        return Components(mean.float(), directions[:, :most].float().contiguous())
    # Of fewer vectors than numbers, the products of the vectors are the smaller matrix, of the same eigenvalues.
    own = torch.linalg.eigh(centered @ centered.mT).eigenvectors.flip(-1)[:, :most]
    # One of them has no variance, in which any direction is left to stand.
    directions = torch.linalg.qr(centered.mT @ own).Q
    return Components(mean.float(), directions.float().contiguous())
