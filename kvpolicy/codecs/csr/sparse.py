"""Vectors as sums of a few atoms of a dictionary: reconstruction, and attention without reconstruction."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.codecs.common import chunks

Read = Callable[[slice], tuple[Tensor, Tensor]]
"""Reads the atom indices, int64, and the coefficients, fp32, of a range of slots, each [B, H, c, p, k]: p chunks of
channels per vector, k pairs per chunk."""


class Dictionary(NamedTuple):
    """The atoms of each KV head: those that all heads share, followed by those of the head alone.

    Attributes:
        shared: [N, d] fp32, unit vectors or zero.
        per_head: [B, H, M, d] fp32, unit vectors or zero; [R, M, d] if B and H are flattened to one dimension.
    """

    shared: Tensor
    per_head: Tensor

    @property
    def size(self) -> int:
        """The number of atoms of a head."""
        return self.shared.shape[0] + self.per_head.shape[-2]

    def table(self) -> Tensor:
        """All atoms of all heads in one matrix, [N + B * H * M, d], as look-ups take it."""
        if not self.per_head.shape[-2]:
            return self.shared
        return torch.cat([self.shared, self.per_head.flatten(0, -2)])

    def table_index(self, index: Tensor) -> Tensor:
        """The rows of the table that hold the atoms `index` [B, H, ...] of each head."""
        *heads, count, _ = self.per_head.shape
        if not count:
            return index
        # Atoms of its own stand behind those of all heads before it.
        offset = torch.arange(math.prod(heads), device=index.device) * count
        offset = offset.reshape(*heads, *[1] * (index.dim() - len(heads)))
        return torch.where(index < self.shared.shape[0], index, index + offset)


def unit(x: Tensor) -> Tensor:
    """Normalize vectors [..., d] to length 1, in fp32; a zero vector stays zero.

    >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 1e-30]])).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0], [0.0, 1.0]]
    """
    x = x.float()
    # Scaled to a largest element of 1 first, so that no square overflows or vanishes.
    peak = x.abs().amax(-1, keepdim=True)
    x = x / peak.masked_fill(peak == 0, 1)
    norm = (x * x).sum(-1, keepdim=True).sqrt()
    return x / norm.masked_fill(norm == 0, 1)


def reconstruct(dictionary: Dictionary, table: Tensor, index: Tensor, coef: Tensor) -> Tensor:
    """Reconstruct vectors from their pairs.

    Args:
        dictionary: The dictionary.
        table: Its `Dictionary.table()`, created once for many calls.
        index: Atom indices, [B, H, ..., k] int64; an atom that occurs twice counts twice.
        coef: Coefficients, [B, H, ..., k] fp32.

    Returns:
        [B, H, ..., d] fp32.
    """
    bags = dictionary.table_index(index).reshape(-1, index.shape[-1])
    sums = F.embedding_bag(bags, table, mode="sum", per_sample_weights=coef.reshape(bags.shape))
    return sums.reshape(*index.shape[:-1], table.shape[-1])


def score(dictionary: Dictionary, queries: Tensor, read: Read, slots: int) -> Tensor:
    """Multiply queries [B, H, G, d] with the vectors of all slots, without reconstructing them.

    The product of a query with each atom is computed once. The score of a slot is then a weighted sum of a few of these
    products.

    Returns:
        [B, H, G, C] fp32.
    """
    batch, heads, group, _ = queries.shape
    queries = queries.float()
    by_atom = torch.cat([queries @ dictionary.shared.mT, queries @ dictionary.per_head.mT], -1)  # [B, H, G, N + M]
    # Atoms become the rows and queries the columns of one table, so that one look-up serves all queries of a head.
    by_atom = by_atom.transpose(-1, -2).reshape(-1, group)
    offset = torch.arange(batch * heads, device=by_atom.device).reshape(batch, heads, 1, 1, 1) * dictionary.size
    scores: list[Tensor] = []
    for at in chunks(slots):
        index, coef = read(at)
        # One bag of atoms per head and slot.
        bags = (index + offset).flatten(-2).flatten(0, 2)
        sums = F.embedding_bag(bags, by_atom, mode="sum", per_sample_weights=coef.reshape(bags.shape))
        scores.append(sums.reshape(batch, heads, -1, group).transpose(-1, -2))
    return torch.cat(scores, -1)


def mix(dictionary: Dictionary, weights: Tensor, read: Read, parts: int) -> Tensor:
    """Compute the weighted sum of the vectors of all slots, without reconstructing them.

    The coefficients, weighted by `weights`, are accumulated per atom; then each atom is used once.

    Args:
        dictionary: The dictionary.
        weights: Attention weights, [B, H, G, C].
        read: Reads the pairs of a range of slots.
        parts: The number of chunks of channels per vector.

    Returns:
        [B, H, G, D] fp32.
    """
    batch, heads, group, slots = weights.shape
    # One row of bins per chunk of channels: the same atom has separate coefficients in different chunks.
    by_atom = torch.zeros(batch, heads, group, parts * dictionary.size, device=weights.device, dtype=torch.float32)
    offset = torch.arange(parts, device=weights.device)[:, None] * dictionary.size
    for at in chunks(slots):
        index, coef = read(at)
        bins = (index + offset).flatten(2)[:, :, None].expand(-1, -1, group, -1)
        weighted = weights[..., at, None].float() * coef.flatten(-2)[:, :, None]
        by_atom = by_atom.scatter_add(-1, bins, weighted.flatten(-2))
    by_atom = by_atom.unflatten(-1, (parts, -1))
    of_shared, of_head = by_atom.split([dictionary.shared.shape[0], dictionary.per_head.shape[-2]], -1)
    from_head = (of_head.flatten(2, 3) @ dictionary.per_head).unflatten(2, (group, parts))
    return (of_shared @ dictionary.shared + from_head).flatten(-2)
