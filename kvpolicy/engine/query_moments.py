"""Moments of a prompt's queries without their rotation, summed in tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.attention import TILE_ELEMENTS
from kvpolicy.engine.mixed_values import read_values
from kvpolicy.engine.prefill import token_positions
from kvpolicy.engine.rotary import KeyRotation, Rope
from kvpolicy.engine.statistic import Candidates, Coming, Tile
from kvpolicy.protocols import Needs, NewToken, QueryMoments


@dataclass(frozen=True)
class Moments:
    """The first and second moments of the queries without their rotation.

    Attributes:
        first: The first position that counts.
        moments: The moments so far; None before a prompt.
        positions: Positions of the prompt's tokens, [B, P] int32, -1 for padding; None before a prompt.
        rope: The rotary embedding of the layer, or None.
    """

    first: int
    moments: QueryMoments | None = None
    positions: Tensor | None = None
    rope: Rope | None = None

    reads_past = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The moments."""
        return self.moments or ()

    def begun(self, coming: Coming) -> Moments:
        """Nothing was seen."""
        return Moments(self.first, None, token_positions(coming.valid, coming.columns, coming.seen), coming.rope)

    def added(self, tile: Tile) -> Moments:
        """Add the queries of a tile."""
        assert self.positions is not None
        at = self.positions[:, tile.start : tile.start + tile.queries.shape[2]]
        moments = sum_moments(tile.queries, tile.keys.shape[1], at, self.first, self.rope)
        return replace(self, moments=moments if self.moments is None else _added(self.moments, moments))

    def joined(self, later: Moments, columns: int) -> Moments:
        """The moments of the queries of both."""
        if self.moments is None or later.moments is None:
            return self if later.moments is None else later
        return replace(later, moments=_added(self.moments, later.moments))

    def beside(self, other: Moments, heads: int) -> Moments:
        """The layer's own: a selector may hold moments of each of its query heads."""
        return self

    def reduced(self, candidates: Candidates) -> Mapping[str, Any]:
        """The moments, and what they are used with."""
        scale = candidates.transform.scale
        return {"moments": self.moments, "mean_rotation": KeyRotation(self.rope).mean, "scale": scale}

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> Moments:
        """The same with `fn` of the moments."""
        return replace(self, moments=None if self.moments is None else QueryMoments(*map(fn, self.moments)))


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


def new_token(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, needs: Needs, rope: Rope | None, latent: int = 0
) -> NewToken | None:
    """The token of a decode step at `positions` [B, 1], as far as a selector needs it; see `read_values`."""
    if not needs.vectors:
        return None
    queries = q.detach()
    plain = None if needs.query_moments is None else plain_queries(queries, positions, rope)
    taken = queries if needs.newest_queries else None
    by_head = (None if t is None else t.squeeze(2).unflatten(1, (k.shape[1], -1)) for t in (plain, taken))
    return NewToken(k.detach(), read_values(k, v, latent).detach(), *by_head)
