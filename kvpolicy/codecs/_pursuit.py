"""Matching pursuit: find a few atoms of a dictionary whose sum comes close to a vector."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.codecs._sparse import Words

Solver = Literal["mp", "refit", "omp"]

_AREA = 2**22, 2**24
"""Numbers that a chunk of vectors may have with all atoms together: 16 MB, which a CPU's caches half hold, or 64 MB."""

_GRAM = 2**25
"""Numbers that the products of all atoms with each other may have (128 MB)."""

_RIDGE = 1e-6
"""What is added to the diagonal of a fit, so that one atom may be there twice."""


def pursue(x: Tensor, words: Words, pairs: int, solver: Solver = "mp") -> tuple[Tensor, Tensor]:
    """Code vectors in `pairs` atoms each.

    Every step takes the atom of the largest absolute product with what is left of the vector, the first of equal ones,
    and takes its part away. An atom may be taken again. A zero vector has the atom 0 with the coefficient 0.

    Args:
        x: Vectors of each row, [B, m, d] fp32.
        words: The dictionary.
        pairs: Atoms per vector, all used.
        solver: `mp` takes the product as the coefficient. `refit` fits the coefficients of mp's atoms together.
            `omp` fits them in every step (orthogonal matching pursuit).

    Returns:
        Atoms [B, m, pairs] int64 and coefficients [B, m, pairs] fp32.

    Example:
        >>> words = Words(torch.tensor([[1.0, 0.0], [0.6, 0.8]]), torch.zeros(1, 0, 2))
        >>> index, coef = pursue(torch.tensor([[[0.0, -2.0]]]), words, 2)
        >>> index.tolist(), [round(c, 2) for c in coef.flatten().tolist()]
        ([[[1, 0]]], [-1.6, 0.96])
        >>> [round(c, 2) for c in pursue(torch.tensor([[[0.0, -2.0]]]), words, 2, "omp")[1].flatten().tolist()]
        [-2.5, 1.5]
    """
    table = words.table()
    if solver != "omp" and _gram_pays(x.shape[1], words.size, pairs):
        rows = [_by_gram(x[row], torch.cat([words.shared, words.own[row]]), pairs) for row in range(x.shape[0])]
        index, coef = (torch.stack(parts) for parts in zip(*rows, strict=True))
    else:
        found = [_by_residual(some, words, table, pairs, solver == "omp") for some in _split(x, words.size)]
        index, coef = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    if solver == "mp":
        return index, coef
    halves = zip(_split(x, pairs * x.shape[-1]), _split(index, pairs * x.shape[-1]), strict=True)
    return index, torch.cat([_fit(some, words, table, its) for some, its in halves], 1)


def _gram_pays(count: int, atoms: int, pairs: int) -> bool:
    """Whether products of atoms with each other, made once per row, cost less than a product in every step."""
    return atoms * atoms <= _GRAM and count * (pairs - 1) > 2 * atoms


def _split(x: Tensor, width: int) -> tuple[Tensor, ...]:
    """Chunks of the vectors of `x` [B, m, ...], for each of which `width` numbers are held."""
    return x.split(max(_AREA[x.device.type != "cpu"] // (x.shape[0] * width), 1), 1)


def _by_residual(x: Tensor, words: Words, table: Tensor, pairs: int, orthogonal: bool) -> tuple[Tensor, Tensor]:
    """Pursue vectors [B, m, d] of all rows at once; every step multiplies what is left with all atoms."""
    rest, indices, coefs, basis = x, [], [], []
    for _ in range(pairs):
        index, coef = _nearest(rest, words)
        atom = F.embedding(words.place(index), table)
        if orthogonal:
            atom = _apart(atom, basis)
            basis.append(atom)
            rest = rest - (rest * atom).sum(-1, keepdim=True) * atom
        else:
            rest = rest - coef[..., None] * atom
        indices.append(index)
        coefs.append(coef)
    return torch.stack(indices, -1), torch.stack(coefs, -1)


def _by_gram(x: Tensor, atoms: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """Pursue vectors [m, d] of one row; a step takes an atom's products with all atoms off the vector's."""
    gram = atoms @ atoms.mT
    found: list[tuple[Tensor, Tensor]] = []
    for some in _split(x[None], len(atoms)):
        products, indices, coefs = some[0] @ atoms.mT, [], []
        for step in range(pairs):
            index, coef = _largest(products)
            if step + 1 < pairs:
                products.addcmul_(gram[index], coef[:, None], value=-1)
            indices.append(index)
            coefs.append(coef)
        found.append((torch.stack(indices, -1), torch.stack(coefs, -1)))
    return torch.cat([index for index, _ in found]), torch.cat([coef for _, coef in found])


def _nearest(rest: Tensor, words: Words) -> tuple[Tensor, Tensor]:
    """The atom [B, m] of the largest absolute product with `rest` [B, m, d], and that product."""
    index, coef = _largest(rest @ words.shared.mT)
    if not words.own.shape[1]:
        return index, coef
    other, its = _largest(rest @ words.own.mT)
    closer = its.abs() > coef.abs()
    return torch.where(closer, other + words.shared.shape[0], index), torch.where(closer, its, coef)


def _largest(products: Tensor) -> tuple[Tensor, Tensor]:
    """Where the largest absolute number of the last dimension is, the first of equal ones, and that number."""
    most, least = products.max(-1), products.min(-1)  # faster than to write down all absolute numbers
    low = (-least.values > most.values) | ((-least.values == most.values) & (least.indices < most.indices))
    return torch.where(low, least.indices, most.indices), torch.where(low, least.values, most.values)


def _apart(atom: Tensor, basis: list[Tensor]) -> Tensor:
    """What of an atom [B, m, d] is orthogonal to the basis, as a unit vector; zero where the basis spans the atom."""
    if not basis:
        return atom
    axes = torch.stack(basis, -2)  # [B, m, k, d]
    for _ in range(2):  # once more, since the first time leaves an error of rounding
        shares = axes @ atom[..., None]
        atom = atom - (shares * axes).sum(-2)
    norm = (atom * atom).sum(-1, keepdim=True).sqrt()
    return torch.where(norm > 1e-3, atom / norm.clamp_min(1e-3), 0)


def _fit(x: Tensor, words: Words, table: Tensor, index: Tensor) -> Tensor:
    """Coefficients [B, m, k] with which atoms come closest to `x` [B, m, d]."""
    atoms = F.embedding(words.place(index), table).double()  # [B, m, k, d]; in fp32 some factors would not exist
    gram = atoms @ atoms.mT + _RIDGE * torch.eye(index.shape[-1], dtype=atoms.dtype, device=atoms.device)
    factor = torch.linalg.cholesky_ex(gram).L
    return torch.cholesky_solve(atoms @ x.double()[..., None], factor).squeeze(-1).float()
