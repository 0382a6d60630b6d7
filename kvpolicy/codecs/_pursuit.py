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
        x: Vectors of each head, [B, H, m, d] fp32.
        words: The dictionary of each head.
        pairs: Atoms per vector, all used.
        solver: `mp` takes the product as the coefficient. `refit` fits the coefficients of mp's atoms together.
            `omp` fits them in every step (orthogonal matching pursuit).

    Returns:
        Atoms [B, H, m, pairs] int64 and coefficients [B, H, m, pairs] fp32. On a CPU those of a head are the same to
        the last bit whatever heads are beside it.

    Examples:
        >>> words = Words(torch.tensor([[1.0, 0.0], [0.6, 0.8]]), torch.zeros(1, 1, 0, 2))
        >>> index, coef = pursue(torch.tensor([[[[0.0, -2.0]]]]), words, 2)
        >>> index.tolist(), [round(c, 2) for c in coef.flatten().tolist()]
        ([[[[1, 0]]]], [-1.6, 0.96])
        >>> [round(c, 2) for c in pursue(torch.tensor([[[[0.0, -2.0]]]]), words, 2, "omp")[1].flatten().tolist()]
        [-2.5, 1.5]
    """
    heads, count, width = x.shape[:2], x.shape[2], max(words.size, pairs * x.shape[3])
    most = max(_AREA[x.device.type != "cpu"] // width, 1)  # vectors at a time, of a head and of all
    x, words = x.flatten(0, 1), Words(words.shared, words.own.flatten(0, 1))
    gram = _gram(words) if solver != "omp" and _gram_pays(count, words.size, pairs) else None
    size = max(most // count, 1) if gram is None else 1  # heads at a time
    found: list[tuple[Tensor, Tensor]] = []
    for some, own in zip(x.split(size), words.own.split(size), strict=True):
        its = Words(words.shared, own)
        if gram is not None:
            _turn_to(gram, its)
        parts = [_solve(part, its, gram, pairs, solver) for part in some.split(most, 1)]
        found.append((torch.cat([index for index, _ in parts], 1), torch.cat([coef for _, coef in parts], 1)))
    index, coef = (torch.cat(parts).unflatten(0, heads) for parts in zip(*found, strict=True))
    return index, coef


def _solve(x: Tensor, words: Words, gram: Tensor | None, pairs: int, solver: Solver) -> tuple[Tensor, Tensor]:
    """Pursue a chunk of vectors, [R, m, d] of R heads."""
    table = words.table()
    if gram is None:
        index, coef = _by_residual(x, words, table, pairs, solver == "omp")
    else:
        index, coef = _by_gram(x, table, gram, pairs)
    return index, coef if solver == "mp" else _fit(x, words, table, index)


def _gram_pays(count: int, atoms: int, pairs: int) -> bool:
    """Whether products of atoms with each other cost less than a product in every step, for `count` vectors of a head.

    They are made once for one head; to others only those of their own atoms come. But how many heads there are must
    not decide: both ways round differently.
    """
    return atoms * atoms <= _GRAM and count * (pairs - 1) > atoms


def _products(x: Tensor, atoms: Tensor) -> Tensor:
    """Products of vectors [R, m, d] with atoms [N, d], or with each head's own [R, N, d]: [R, m, N].

    Every head is multiplied by itself, since how products of all vectors together are rounded depends on how many they
    are. It is so in two halves, because a lone matrix is multiplied in another way than several; a lone vector is not.
    """
    count, halves = x.shape[1], min(x.shape[1], 2)
    parts = F.pad(x, (0, 0, 0, count % halves)).reshape(len(x) * halves, -1, x.shape[2])
    each = atoms.repeat_interleave(halves, 0) if atoms.dim() == 3 else atoms.expand(len(parts), -1, -1)
    return torch.bmm(parts, each.mT).reshape(len(x), -1, atoms.shape[-2])[:, :count]


def _gram(words: Words) -> Tensor:
    """Products of all atoms of the first head with each other, [N + M, N + M]."""
    table = Words(words.shared, words.own[:1]).table()
    return _products(table[None], table)[0]


def _turn_to(gram: Tensor, words: Words) -> None:
    """Put the products of one head's own atoms into those of another head, in place."""
    shared, own = words.shared.shape[0], words.own.shape[1]
    if own:
        gram[shared:] = _products(words.own, words.table())[0]
        gram[:shared, shared:] = gram[shared:, :shared].mT


def _by_residual(x: Tensor, words: Words, table: Tensor, pairs: int, orthogonal: bool) -> tuple[Tensor, Tensor]:
    """Pursue vectors [R, m, d] of some heads at once; every step multiplies what is left with all atoms."""
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


def _by_gram(x: Tensor, table: Tensor, gram: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """Pursue vectors [1, m, d] of one head; a step takes an atom's products with all atoms off the vector's."""
    products, indices, coefs = _products(x, table)[0], [], []
    for step in range(pairs):
        index, coef = _largest(products)
        if step + 1 < pairs:
            products.addcmul_(gram[index], coef[:, None], value=-1)
        indices.append(index)
        coefs.append(coef)
    return torch.stack(indices, -1)[None], torch.stack(coefs, -1)[None]


def _nearest(rest: Tensor, words: Words) -> tuple[Tensor, Tensor]:
    """The atom [R, m] of the largest absolute product with `rest` [R, m, d], and that product."""
    index, coef = _largest(_products(rest, words.shared))
    if not words.own.shape[1]:
        return index, coef
    other, its = _largest(_products(rest, words.own))
    closer = its.abs() > coef.abs()
    return torch.where(closer, other + words.shared.shape[0], index), torch.where(closer, its, coef)


def _largest(products: Tensor) -> tuple[Tensor, Tensor]:
    """Where the largest absolute number of the last dimension is, the first of equal ones, and that number."""
    most, least = products.max(-1), products.min(-1)  # faster than to write down all absolute numbers
    low = (-least.values > most.values) | ((-least.values == most.values) & (least.indices < most.indices))
    return torch.where(low, least.indices, most.indices), torch.where(low, least.values, most.values)


def _apart(atom: Tensor, basis: list[Tensor]) -> Tensor:
    """What of an atom [R, m, d] is orthogonal to the basis, as a unit vector; zero where the basis spans the atom."""
    if not basis:
        return atom
    axes = torch.stack(basis, -2)  # [R, m, k, d]
    for _ in range(2):  # once more, since the first time leaves an error of rounding
        shares = (axes * atom[..., None, :]).sum(-1, keepdim=True)
        atom = atom - (shares * axes).sum(-2)
    norm = (atom * atom).sum(-1, keepdim=True).sqrt()
    return torch.where(norm > 1e-3, atom / norm.clamp_min(1e-3), 0)


def _fit(x: Tensor, words: Words, table: Tensor, index: Tensor) -> Tensor:
    """Coefficients [R, m, k] with which atoms come closest to `x` [R, m, d]."""
    atoms = F.embedding(words.place(index), table).double()  # [R, m, k, d]; in fp32 some factors would not exist
    gram = atoms @ atoms.mT + _RIDGE * torch.eye(index.shape[-1], dtype=atoms.dtype, device=atoms.device)
    factor = torch.linalg.cholesky_ex(gram).L
    products = (atoms * x.double()[..., None, :]).sum(-1, keepdim=True)
    return torch.cholesky_solve(products, factor).squeeze(-1).float()
