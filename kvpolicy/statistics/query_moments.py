"""Moments of a prompt's queries without their rotation, summed in tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvpolicy.kernels.rotary import KeyRotation, Rope
from kvpolicy.statistics.statistic import Coming, Context, Sizes, Statistic, Tile, Working
from kvpolicy.statistics.windows import TILE_ELEMENTS


class QueryMoments(NamedTuple):
    """The first and second moments of queries without their rotation, fp32, of valid tokens only.

    Attributes:
        queries: How many queries there are, [B].
        total: Their sum, [B, H, G, D].
        product: The sum of their outer products, [B, H, G, D, D].
    """

    queries: Tensor
    total: Tensor
    product: Tensor


class ObservedMoments(NamedTuple):
    """The moments of a forward's queries, and what they are used with.

    Attributes:
        moments: The moments; None if no query counts.
        rotation: How the model rotates queries.
    """

    moments: QueryMoments | None
    rotation: KeyRotation


@dataclass(frozen=True)
class Moments(Statistic[ObservedMoments]):
    """The first and second moments of the queries without their rotation.

    Attributes:
        first: The first position that counts.
        moments: The moments so far; None before a prompt.
        positions: Positions of the prompt's tokens, [B, P] int32, -1 for padding; None before a prompt and behind it.
        rope: The rotary embedding of the layer, or None.
    """

    first: int
    moments: QueryMoments | None = None
    positions: Tensor | None = None
    rope: Rope | None = None

    words: ClassVar[str] = "the mean and covariance of the queries"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The moments."""
        return self.moments or ()

    def begun(self, coming: Coming) -> Moments:
        """Nothing was seen."""
        return Moments(self.first, None, coming.positions, coming.rope)

    def added(self, tile: Tile) -> Moments:
        """Add the queries of a tile."""
        assert self.positions is not None
        stop = tile.start + tile.queries.shape[2]
        moments = sum_moments(
            tile.queries, tile.keys.shape[1], self.positions[:, tile.start : stop], self.first, self.rope
        )
        return replace(
            self,
            moments=moments if self.moments is None else _added(self.moments, moments),
            positions=self.positions if stop < self.positions.shape[1] else None,
        )

    def joined(self, later: Any, columns: int) -> Moments:
        """The moments of the queries of both."""
        if self.moments is None or later.moments is None:
            return self if later.moments is None else later
        return replace(later, moments=_added(self.moments, later.moments))

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> Moments:
        """The same with `fn` of the moments."""
        return replace(self, moments=None if self.moments is None else QueryMoments(*map(fn, self.moments)))

    def reduced(self, context: Context) -> ObservedMoments:
        """The moments, and how queries are rotated."""
        return ObservedMoments(self.moments, KeyRotation(self.rope))

    def working(self, sizes: Sizes) -> Working:
        """Several tensors of a tile of queries."""
        elements = sizes.batch * sizes.tile * sizes.widest
        return Working(chosen=5 * 4 * min(TILE_ELEMENTS // 4, elements))


def _added(first: QueryMoments, second: QueryMoments) -> QueryMoments:
    return QueryMoments(*(a + b for a, b in zip(first, second, strict=True)))


def sum_moments(q: Tensor, heads: int, positions: Tensor, first: int, rope: Rope | None) -> QueryMoments:
    """The moments of the queries at position `first` and later.

    Args:
        q: As attention takes them, [B, Hq, P, D].
        heads: KV heads.
        positions: Positions of the queries, [B, P], -1 for padding.
        first: The first position that counts.
        rope: The layer's rotary embedding, or None.
    """
    batch, query_heads, new, dim = q.shape
    counts = positions >= first
    total = q.new_zeros(batch, query_heads, dim, dtype=torch.float32)
    product = q.new_zeros(batch, query_heads, dim, dim, dtype=torch.float32)
    left_out = (~counts).any(0).tolist()  # columns of padding, and of the first tokens
    rows = max(TILE_ELEMENTS // (4 * batch * query_heads * dim), 16)  # several tensors of a tile stay in the cache
    for start in range(0, new, rows):
        at = slice(start, start + rows)
        tile = plain_queries(q[:, :, at], positions[:, at], rope)
        if any(left_out[at]):  # padding may hold inf or NaN
            tile = tile.masked_fill(~counts[:, None, at, None], 0)
        total += tile.sum(2)
        product += tile.mT @ tile
    count = counts.sum(-1).float()
    return QueryMoments(count, total.unflatten(1, (heads, -1)), product.unflatten(1, (heads, -1)))


def plain_queries(q: Tensor, positions: Tensor, rope: Rope | None) -> Tensor:
    """Queries [B, Hq, n, D] at positions [B, n] without their rotation, fp32."""
    return q.float() if rope is None else rope.unrotate_rows(q, positions)
