"""Vectors as a few atoms of a dictionary: how they are read back, scored and mixed without being read back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.codecs._common import chunks

Read = Callable[[slice], tuple[Tensor, Tensor]]
"""Atoms, int64, and coefficients, fp32, of some slots, each [B, H, c, p, k]: p parts of a vector, k pairs each."""


class Words(NamedTuple):
    """The dictionary of each KV head: atoms that all weights, and behind them those of the head alone.

    Attributes:
        shared: [N, d] fp32, unit vectors or zero.
        own: [B, H, M, d] fp32, unit vectors or zero; [R, M, d] where B and H are one dimension.
    """

    shared: Tensor
    own: Tensor

    @property
    def size(self) -> int:
        """Atoms that a head has."""
        return self.shared.shape[0] + self.own.shape[-2]

    def table(self) -> Tensor:
        """Every atom once, [N + B * H * M, d]."""
        return torch.cat([self.shared, self.own.flatten(0, -2)]) if self.own.shape[-2] else self.shared

    def place(self, index: Tensor) -> Tensor:
        """Where in the table the atoms `index` [B, H, ...] of each head are."""
        *heads, own, _ = self.own.shape
        if not own:
            return index
        first = torch.arange(math.prod(heads), device=index.device) * own
        first = first.reshape(*heads, *[1] * (index.dim() - len(heads)))
        return torch.where(index < self.shared.shape[0], index, index + first)


def unit(x: Tensor) -> Tensor:
    """Vectors [..., d] of length 1 in the direction of `x`, fp32; zero stays zero.

    >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 1e-30]])).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0], [0.0, 1.0]]
    """
    x = x.float()
    peak = x.abs().amax(-1, keepdim=True)
    x = x / peak.masked_fill(peak == 0, 1)  # first, so that no square overflows or vanishes
    norm = (x * x).sum(-1, keepdim=True).sqrt()
    return x / norm.masked_fill(norm == 0, 1)


def spell(words: Words, table: Tensor, index: Tensor, coef: Tensor) -> Tensor:
    """Read vectors back.

    Args:
        words: The dictionary.
        table: Its `Words.table()`, which is made once for many calls.
        index: Atoms, [B, H, ..., k] int64; an atom that is there twice counts twice.
        coef: Their coefficients, [B, H, ..., k] fp32.

    Returns:
        [B, H, ..., d] fp32.
    """
    bags = words.place(index).reshape(-1, index.shape[-1])
    sums = F.embedding_bag(bags, table, mode="sum", per_sample_weights=coef.reshape(bags.shape))
    return sums.reshape(*index.shape[:-1], table.shape[-1])


def score(words: Words, queries: Tensor, read: Read, slots: int) -> Tensor:
    """Products of queries [B, H, G, d] with the vectors of all slots, [B, H, G, C] fp32.

    A query meets every atom once; a slot's product is then a sum of a few of these numbers.
    """
    batch, heads, group, _ = queries.shape
    queries = queries.float()
    met = torch.cat([queries @ words.shared.mT, queries @ words.own.mT], -1)  # [B, H, G, N + M]
    met = met.transpose(-1, -2).reshape(-1, group)  # one look-up serves all queries of a head
    first = torch.arange(batch * heads, device=met.device).reshape(batch, heads, 1, 1, 1) * words.size
    parts: list[Tensor] = []
    for at in chunks(slots):
        index, coef = read(at)
        bags = (index + first).flatten(-2).flatten(0, 2)
        sums = F.embedding_bag(bags, met, mode="sum", per_sample_weights=coef.reshape(bags.shape))
        parts.append(sums.reshape(batch, heads, -1, group).transpose(-1, -2))
    return torch.cat(parts, -1)


def mix(words: Words, weights: Tensor, read: Read, parts: int) -> Tensor:
    """Vectors of all slots, of `parts` parts, weighted by `weights` [B, H, G, C] and summed, [B, H, G, D] fp32.

    The weights are added up for each atom; then each atom is taken once.
    """
    batch, heads, group, slots = weights.shape
    weight = torch.zeros(batch, heads, group, parts * words.size, device=weights.device)
    first = torch.arange(parts, device=weights.device)[:, None] * words.size
    for at in chunks(slots):
        index, coef = read(at)
        bins = (index + first).flatten(2)[:, :, None].expand(-1, -1, group, -1)
        weight = weight.scatter_add(
            -1, bins, (weights[..., at, None].float() * coef.flatten(-2)[:, :, None]).flatten(-2)
        )
    weight = weight.unflatten(-1, (parts, -1))
    some, rest = weight.split([words.shared.shape[0], words.own.shape[-2]], -1)
    own = (rest.flatten(2, 3) @ words.own).unflatten(2, (group, parts))
    return (some @ words.shared + own).flatten(-2)
