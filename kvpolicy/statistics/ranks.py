"""The ranks over which a model's heads are sharded, and the reductions over all of them that a policy needs.

A rank holds its own KV heads only. Whatever depends on all heads goes through `Ranks`; on a single rank every method
returns its input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The ranks that hold the heads of a model, as seen from one of them; a single rank by default.

    Sums are gathered and then added in the order of the ranks, so that all ranks get the same bits. Every method that
    communicates must be called by all ranks, equally often and with equal shapes, regardless of their data.

    Attributes:
        rank: This rank.
        size: The number of ranks.
        group: Name of their process group; empty for a single rank.
        replicas: How many ranks hold each KV head.
        twins: Name of the group of ranks that hold the same KV heads; empty if no other rank does.
        queries: Query heads on each rank; empty for a single rank.
        heads: KV heads on each rank; empty for a single rank. A rank without heads gets a phantom one from the engine,
            so that it runs the same collectives as the others; it is left out of all sums.
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
        """Whether this rank has only a phantom head."""
        return bool(self.heads) and not self.heads[self.rank]

    @property
    def held(self) -> slice:
        """The KV heads of the model that this rank holds."""
        if not self.heads:
            return slice(None)
        if self.phantom:
            return slice(0, 1)
        first = sum(self.heads[: self.rank]) // self.replicas
        return slice(first, first + self.heads[self.rank])

    def most_heads(self, own: int) -> int:
        """The largest number of KV heads of any rank, where this one has `own`."""
        return max(self.heads, default=own)

    def most_group(self, own: int) -> int:
        """The largest number of query heads per KV head of any rank, where this one has `own`."""
        return max((q // h for q, h in zip(self.queries, self.heads, strict=True) if h), default=own)

    def query_heads(self, own: int) -> int:
        """Query heads of the whole model, of which this rank has `own`; also of several layers that read the same keys.

        Then `own` and the result are those of all these layers together.
        """
        return sum(self.queries) * self._layers(own) if self.queries else own

    def _layers(self, own: int) -> int:
        """How many layers `own` query heads of this rank are from: those that read the same keys are together."""
        return own // max(self.queries[self.rank], 1)

    def kv_heads(self, own: int) -> int:
        """KV heads of the whole model, of which this rank has `own`."""
        return sum(self.heads) // self.replicas or own

    def all_heads(self, x: Tensor) -> Tensor:
        """A tensor of this rank's KV heads as one of all of the model's, [B, H, ...] -> [B, H of the model, ...].

        All dimensions but that of heads must be equal on all ranks.
        """
        if self.size == 1:
            return x
        padding = x.new_zeros(x.shape[0], self.most_heads(x.shape[1]) - x.shape[1], *x.shape[2:])
        every = gather(torch.cat([x, padding], 1), self.size, self.group)
        # Of the ranks that hold the same heads, the first is taken.
        parts = [every[rank, :, :count] for rank, count in enumerate(self.heads) if rank % self.replicas == 0]
        return torch.cat(parts, 1)

    def all_queries(self, x: Tensor) -> Tensor:
        """A tensor of this rank's query heads as one of all of the model's, [B, Hq, ...] -> [B, Hq of the model, ...].

        All dimensions but that of heads must be equal on all ranks.
        """
        if not self.queries:
            return x
        layers = self._layers(x.shape[1])
        every = x.new_zeros(x.shape[0], sum(self.queries) * layers, *x.shape[2:], dtype=torch.float64)
        first = sum(self.queries[: self.rank]) * layers
        own = self.queries[self.rank] * layers
        every[:, first : first + own] = x[:, :own].double()
        return self.total(every).to(x.dtype)

    def mine(self, line: Tensor) -> Tensor:
        """This rank's slice of a tensor over all query heads, [Hq of the model, ...] -> [Hq, ...]."""
        if not self.queries:
            return line
        layers = len(line) // sum(self.queries)
        first = 0 if self.phantom else sum(self.queries[: self.rank])
        return line[first * layers :][: max(self.queries[self.rank], 1) * layers]

    def total(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks, for integers or fp64 of any shape."""
        if self.size == 1:
            return x
        return gather(torch.zeros_like(x) if self.phantom else x, self.size, self.group).sum(0, dtype=x.dtype)

    def head_mean(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Mean over all query heads of the model, [B, Hq, N] -> [B, N], in `dtype` or that of `x`; summed in fp64."""
        count = self.query_heads(x.shape[1])
        if self.size == 1 and _is_exact(count):
            return x.mean(1, dtype=torch.float64).to(dtype or x.dtype)
        total = self.total(x.sum(1, dtype=torch.float64))
        return (total / count).to(dtype or x.dtype)

    def group_mean(self, x: Tensor) -> Tensor:
        """Mean over the query heads of each KV head, [B, H, G, N] -> [B, H, N], in the dtype of `x`; summed in fp64."""
        count = x.shape[2] * self.replicas
        if count == 1:
            return x.squeeze(2)  # two operations less in each step of a model without groups
        if count == x.shape[2] and _is_exact(count):
            return x.mean(2, dtype=torch.float64).to(x.dtype)
        total = x.sum(2, dtype=torch.float64)
        if self.twins:
            total = gather(total, self.replicas, self.twins).sum(0)
        return (total / count).to(x.dtype)

    def largest(self, x: Tensor) -> Tensor:
        """The elementwise maximum over the ranks that hold the same KV heads."""
        return gather(x, self.replicas, self.twins).amax(0) if self.twins else x

    def agree(self, x: Tensor) -> bool:
        """Whether `x` is bitwise equal on all ranks."""
        return self.size == 1 or bool((gather(x, self.size, self.group) == x).all())


def _is_exact(count: int) -> bool:
    """Whether a mean of `count` numbers is their sum divided by it bit for bit, also if multiplied by 1 / count."""
    return count > 0 and count & (count - 1) == 0


SINGLE_RANK = Ranks()
"""One rank that holds all heads."""


def gather(x: Tensor, size: int, group: str) -> Tensor:
    """The `x` of every rank, [size, ...], in order; it does not break a compiled graph."""
    ops = torch.ops._c10d_functional  # the functional collectives, which torch.compile traces
    got = ops.all_gather_into_tensor(x.detach().contiguous()[None], size, group)
    return ops.wait_tensor(got)
