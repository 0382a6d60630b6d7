"""Matching pursuit: approximate a vector by a sum of a few atoms of a dictionary.

Two algorithms give the same pairs up to rounding. `_by_residual` subtracts the contribution of an atom from the vector
and multiplies the residual with all atoms again. `_by_gram` computes the products of all atoms with each other (the
Gram matrix) once, and subtracts a row of it from the products of the vector; it is faster for many vectors.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.codecs.csr.sparse import Dictionary

Solver = Literal["mp", "refit", "omp"]

_CPU_CHUNK = 2**18
"""Elements of the products of a chunk of vectors with all atoms on a CPU: 1 MB, which the cache of a core holds."""

_DEVICE_CHUNK = 2**24
"""The same on an accelerator: 64 MB."""

_MAX_GRAM = 2**25
"""The largest number of elements of a Gram matrix: 128 MB."""

_BLOCK = 32
"""Atoms that are searched together for the largest product on a CPU."""

_RIDGE = 1e-6
"""Number added to the diagonal of a least-squares fit, so that it has a solution if an atom occurs twice."""


def pursue(x: Tensor, dictionary: Dictionary, pairs: int, solver: Solver = "mp") -> tuple[Tensor, Tensor]:
    """Encode vectors in `pairs` pairs of an atom and a coefficient.

    Each step selects the atom with the largest absolute product with the residual of the vector, the first one of
    equals, and subtracts its contribution. An atom can be selected again. A zero vector has atom 0 with coefficient 0.

    Args:
        x: The vectors of each head, [B, H, m, d] fp32.
        dictionary: The atoms of each head.
        pairs: Pairs per vector.
        solver: `mp` uses the product as the coefficient. `refit` fits the coefficients of the atoms of `mp` jointly.
            `omp` fits them in every step (orthogonal matching pursuit).

    Returns:
        Atom indices [B, H, m, pairs] int64 and coefficients [B, H, m, pairs] fp32. On a CPU, those of a head are
        bit-identical whichever other heads are in the tensor.

    Examples:
        >>> dictionary = Dictionary(torch.tensor([[1.0, 0.0], [0.6, 0.8]]), torch.zeros(1, 1, 0, 2))
        >>> index, coef = pursue(torch.tensor([[[[0.0, -2.0]]]]), dictionary, 2)
        >>> index.tolist(), [round(c, 2) for c in coef.flatten().tolist()]
        ([[[[1, 0]]]], [-1.6, 0.96])
        >>> [round(c, 2) for c in pursue(torch.tensor([[[[0.0, -2.0]]]]), dictionary, 2, "omp")[1].flatten().tolist()]
        [-2.5, 1.5]
    """
    heads = x.shape[:2]
    count = x.shape[2]
    widest = max(dictionary.size, pairs * x.shape[3])
    # Vectors of all heads together, so that their products with all atoms fit one chunk.
    max_vectors = max((_CPU_CHUNK if x.device.type == "cpu" else _DEVICE_CHUNK) // widest, 1)
    x = x.flatten(0, 1)
    dictionary = Dictionary(dictionary.shared, dictionary.per_head.flatten(0, 1))
    use_gram = solver != "omp" and _gram_pays(count, dictionary.size, pairs)
    gram = _gram(dictionary) if use_gram else None
    # A Gram matrix belongs to one head. Without it, as many heads are solved together as fit a chunk.
    heads_at_once = 1 if use_gram else max(max_vectors // count, 1)
    solved: list[tuple[Tensor, Tensor]] = []
    for vectors, per_head in zip(x.split(heads_at_once), dictionary.per_head.split(heads_at_once), strict=True):
        atoms = Dictionary(dictionary.shared, per_head)
        if gram is not None:
            _set_head(gram, atoms)
        chunks = [_solve(chunk, atoms, gram, pairs, solver) for chunk in vectors.split(max_vectors, 1)]
        solved.append((torch.cat([index for index, _ in chunks], 1), torch.cat([coef for _, coef in chunks], 1)))
    index, coef = (torch.cat(parts).unflatten(0, heads) for parts in zip(*solved, strict=True))
    return index, coef


def _solve(x: Tensor, dictionary: Dictionary, gram: Tensor | None, pairs: int, solver: Solver) -> tuple[Tensor, Tensor]:
    """Pursue a chunk of vectors of R heads, [R, m, d]."""
    table = dictionary.table()
    if gram is None:
        index, coef = _by_residual(x, dictionary, table, pairs, solver == "omp")
    else:
        index, coef = _by_gram(x, table, gram, pairs)
    if solver != "mp":
        coef = _fit(x, dictionary, table, index)
    return index, coef


def _gram_pays(count: int, atoms: int, pairs: int) -> bool:
    """Whether a Gram matrix costs less than a product in every step, for `count` vectors of a head.

    The products of the shared atoms are computed once, those of its own atoms for each head. The number of heads must
    not be part of the decision, because the two algorithms round differently.
    """
    return atoms * atoms <= _MAX_GRAM and count * (pairs - 1) > atoms


def _products(x: Tensor, atoms: Tensor) -> Tensor:
    """Products of vectors [R, m, d] with atoms [N, d], or with atoms per head [R, N, d]: [R, m, N]."""
    # The rounding of a matrix product depends on its size, so each head is a matrix of a batched product. A batch of
    # one matrix is computed by another routine than a batch of several, so every head is split into two halves, which
    # makes the batch at least two. A single vector needs no split.
    count = x.shape[1]
    halves = min(count, 2)
    padded = F.pad(x, (0, 0, 0, count % halves)).reshape(len(x) * halves, -1, x.shape[2])
    of_half = atoms.repeat_interleave(halves, 0) if atoms.dim() == 3 else atoms.expand(len(padded), -1, -1)
    return torch.bmm(padded, of_half.mT).reshape(len(x), -1, atoms.shape[-2])[:, :count]


def _gram(dictionary: Dictionary) -> Tensor:
    """Products of all atoms of the first head with each other, [N + M, N + M]."""
    table = Dictionary(dictionary.shared, dictionary.per_head[:1]).table()
    return _products(table[None], table)[0]


def _set_head(gram: Tensor, dictionary: Dictionary) -> None:
    """Replace the products of one head's own atoms in a Gram matrix by those of another head, in place."""
    shared = dictionary.shared.shape[0]
    if dictionary.per_head.shape[1]:
        gram[shared:] = _products(dictionary.per_head, dictionary.table())[0]
        gram[:shared, shared:] = gram[shared:, :shared].mT


def _by_residual(
    x: Tensor, dictionary: Dictionary, table: Tensor, pairs: int, orthogonal: bool
) -> tuple[Tensor, Tensor]:
    """Pursue vectors [R, m, d] of several heads; every step multiplies the residual with all atoms."""
    residual = x
    indices: list[Tensor] = []
    coefs: list[Tensor] = []
    basis: list[Tensor] = []
    for _ in range(pairs):
        index, coef = _best_atom(residual, dictionary)
        atom = F.embedding(dictionary.table_index(index), table)
        if orthogonal:
            # The residual of a joint fit is orthogonal to all selected atoms, so it suffices to remove its component
            # along the part of the new atom that is orthogonal to the earlier ones.
            atom = _orthogonal_part(atom, basis)
            basis.append(atom)
            residual = residual - (residual * atom).sum(-1, keepdim=True) * atom
        else:
            residual = residual - coef[..., None] * atom
        indices.append(index)
        coefs.append(coef)
    return torch.stack(indices, -1), torch.stack(coefs, -1)


def _by_gram(x: Tensor, table: Tensor, gram: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """Pursue vectors [1, m, d] of one head; a step subtracts a row of the Gram matrix from the products."""
    products = _products(x, table)[0]
    # Every step writes the same two buffers, which stay in the cache of a core.
    rows = torch.empty_like(products)
    absolute = torch.empty_like(products)
    indices: list[Tensor] = []
    coefs: list[Tensor] = []
    for step in range(pairs):
        index, coef = _largest(products, absolute)
        # <x - c a, b> = <x, b> - c <a, b> for every atom b.
        if step + 1 < pairs:
            products.addcmul_(torch.index_select(gram, 0, index, out=rows), coef[:, None], value=-1)
        indices.append(index)
        coefs.append(coef)
    return torch.stack(indices, -1)[None], torch.stack(coefs, -1)[None]


def _best_atom(residual: Tensor, dictionary: Dictionary) -> tuple[Tensor, Tensor]:
    """The atom [R, m] with the largest absolute product with `residual` [R, m, d], and that product."""
    # Two products, because one would need a copy of the shared atoms for every head.
    index, coef = _largest(_products(residual, dictionary.shared))
    if not dictionary.per_head.shape[1]:
        return index, coef
    own_index, own_coef = _largest(_products(residual, dictionary.per_head))
    is_larger = own_coef.abs() > coef.abs()  # ties go to the shared atom, which comes first
    index = torch.where(is_larger, own_index + dictionary.shared.shape[0], index)
    return index, torch.where(is_larger, own_coef, coef)


def _largest(products: Tensor, absolute: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Index and value of the element of largest absolute value in the last dimension, the first one of equals.

    Args:
        products: [..., N].
        absolute: A buffer of the same shape, which may be overwritten.
    """
    count = products.shape[-1]
    whole = count - count % _BLOCK
    if products.device.type != "cpu" or not whole:
        return _largest_of_few(products)
    if whole == count:
        return _largest_by_block(products, absolute)
    index, coef = _largest_by_block(products[..., :whole], None)
    last_index, last_coef = _largest_of_few(products[..., whole:])
    is_larger = last_coef.abs() > coef.abs()  # ties go to the first
    return torch.where(is_larger, last_index + whole, index), torch.where(is_larger, last_coef, coef)


def _largest_of_few(products: Tensor) -> tuple[Tensor, Tensor]:
    """`_largest`, in two reductions with indices: faster than writing all absolute values to memory."""
    most = products.max(-1)
    least = products.min(-1)
    is_negative = (-least.values > most.values) | ((-least.values == most.values) & (least.indices < most.indices))
    index = torch.where(is_negative, least.indices, most.indices)
    return index, torch.where(is_negative, least.values, most.values)


def _largest_by_block(products: Tensor, absolute: Tensor | None) -> tuple[Tensor, Tensor]:
    """`_largest`, for products of whole blocks of atoms on a CPU.

    There, a reduction that returns indices compares one element at a time, and one that returns values compares many
    at once. So the largest value of each block is computed first, and indices are searched among the blocks and in one
    of them: three times as fast with 512 atoms.
    """
    blocks = torch.abs(products, out=absolute).reshape(-1, _BLOCK)
    count = products.shape[-1] // _BLOCK  # of each vector
    block = blocks.amax(-1).view(-1, count).argmax(-1)  # argmax returns the first of equals
    first = torch.arange(0, len(blocks), count, device=block.device)
    within = blocks.index_select(0, first + block).argmax(-1)
    index = (block * _BLOCK + within).reshape(products.shape[:-1])
    return index, products.gather(-1, index[..., None]).squeeze(-1)


def _orthogonal_part(atom: Tensor, basis: list[Tensor]) -> Tensor:
    """The part of an atom [R, m, d] that is orthogonal to the basis, as a unit vector; zero if the basis spans it."""
    if not basis:
        return atom
    axes = torch.stack(basis, -2)  # [R, m, k, d]
    for _ in range(2):  # the second pass removes the rounding error of the first
        components = (axes * atom[..., None, :]).sum(-1, keepdim=True)
        atom = atom - (components * axes).sum(-2)
    norm = (atom * atom).sum(-1, keepdim=True).sqrt()
    return torch.where(norm > 1e-3, atom / norm.clamp_min(1e-3), 0)


def _fit(x: Tensor, dictionary: Dictionary, table: Tensor, index: Tensor) -> Tensor:
    """Least-squares coefficients [R, m, k] of the atoms `index` for the vectors `x` [R, m, d]."""
    # In fp64, because in fp32 the Cholesky factor of nearly equal atoms may not exist.
    atoms = F.embedding(dictionary.table_index(index), table).double()  # [R, m, k, d]
    gram = atoms @ atoms.mT + _RIDGE * torch.eye(index.shape[-1], dtype=atoms.dtype, device=atoms.device)
    # `cholesky` would check for errors, which waits for the device; the ridge makes the matrix positive definite.
    factor = torch.linalg.cholesky_ex(gram).L
    products = (atoms * x.double()[..., None, :]).sum(-1, keepdim=True)
    return torch.cholesky_solve(products, factor).squeeze(-1).float()
