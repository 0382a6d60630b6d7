"""The ranks that share a model's heads, and what a policy must ask all of them.

A rank holds its own KV heads and knows nothing of the others'. Whatever looks at all heads goes through `Ranks`; on a
single rank every method returns its input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The ranks that hold one model's heads, as one of them knows them; alone by default.

    What is summed is gathered and then added in the order of the ranks, so that all have the same bits. Every method
    that asks the others must be called by all ranks, equally often and with equal shapes, whatever their data.

    Attributes:
        rank: Which of them this is.
        size: How many there are.
        group: Name of their process group; nothing where there is one.
        replicas: How many ranks hold each KV head.
        twins: Name of the group of ranks that hold the same KV heads; nothing where there is one.
        queries: Query heads on each rank; nothing where there is one.
        heads: KV heads on each rank, likewise. A rank that has none is given a phantom one by the engine, so that it
            does as the others do; no sum counts it.
    """

    rank: int = 0
    size: int = 1
    group: str = ""
    replicas: int = 1
    twins: str = ""
    queries: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()

    @property
    def phantom(self) -> bool:
        """Whether this rank has no head but the phantom one."""
        return bool(self.heads) and not self.heads[self.rank]

    @property
    def held(self) -> slice:
        """Which of the model's KV heads are held here."""
        if not self.heads:
            return slice(None)
        if self.phantom:
            return slice(0, 1)
        first = sum(self.heads[: self.rank]) // self.replicas
        return slice(first, first + self.heads[self.rank])

    def most_heads(self, own: int) -> int:
        """KV heads of the fullest rank, where this one has `own`; a budget of bytes is the same on all."""
        return max(self.heads, default=own)

    def query_heads(self, own: int) -> int:
        """Query heads of the whole model, of which `own` are here."""
        return sum(self.queries) or own

    def mine(self, line: Tensor) -> Tensor:
        """This rank's part of a tensor over all query heads, [Hq of the model, ...] -> [Hq, ...]."""
        if not self.queries:
            return line
        first = 0 if self.phantom else sum(self.queries[: self.rank])
        return line[first : first + max(self.queries[self.rank], 1)]

    def total(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, of any shape and of whole numbers or fp64."""
        if self.size == 1:
            return x
        return gather(torch.zeros_like(x) if self.phantom else x, self.size, self.group).sum(0, dtype=x.dtype)

    def head_mean(self, x: Tensor) -> Tensor:
        """Mean over all query heads of the model, [B, Hq, N] -> [B, N], in the dtype of `x`; summed in fp64."""
        total = self.total(x.sum(1, dtype=torch.float64))
        return (total / self.query_heads(x.shape[1])).to(x.dtype)

    def group_mean(self, x: Tensor) -> Tensor:
        """Mean over the query heads of each KV head, [B, H, G, N] -> [B, H, N], in the dtype of `x`; summed in fp64."""
        total = x.sum(2, dtype=torch.float64)
        if self.twins:
            total = gather(total, self.replicas, self.twins).sum(0)
        return (total / (x.shape[2] * self.replicas)).to(x.dtype)

    def largest(self, x: Tensor) -> Tensor:
        """The largest of each number over the ranks that hold the same KV heads."""
        return gather(x, self.replicas, self.twins).amax(0) if self.twins else x

    def agree(self, x: Tensor) -> bool:
        """Whether `x` is the same on all ranks, to the bit."""
        return self.size == 1 or bool((gather(x, self.size, self.group) == x).all())


SINGLE_RANK = Ranks()
"""One rank that holds all heads."""


def gather(x: Tensor, size: int, group: str) -> Tensor:
    """Every rank's `x`, [size, ...], in their order; stays inside a compiled graph."""
    ops = torch.ops._c10d_functional  # what torch.compile turns torch.distributed's own calls into
    got = ops.all_gather_into_tensor(x.detach().contiguous()[None], size, group)
    return ops.wait_tensor(got)
