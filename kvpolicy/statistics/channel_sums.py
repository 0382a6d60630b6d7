"""Statistics of the channels of a prompt's queries and keys, for codecs and readers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvpolicy.statistics.ranks import Ranks
from kvpolicy.statistics.statistic import Context, KeptStatistic, Sizes, Statistic, Tile, Working
from kvpolicy.statistics.window_statistic import NewestWindow
from kvpolicy.statistics.windows import QueryWindow, together


class AbsoluteSums(NamedTuple):
    """Sums of the absolute queries and keys of a prompt in each channel, padding left out.

    Attributes:
        queries: [B, Hq, D] fp64.
        keys: [B, H, D] fp64.
    """

    queries: Tensor
    keys: Tensor

    def plus(self, other: AbsoluteSums) -> AbsoluteSums:
        """The sums of both."""
        return AbsoluteSums(self.queries + other.queries, self.keys + other.keys)


def absolute_sums(q: Tensor, k: Tensor, valid: Tensor | None) -> AbsoluteSums:
    """Sum the absolute queries [B, Hq, P, D] and keys [B, H, P, D] of the tokens that are `valid` [B, P], or of all."""

    def total(x: Tensor) -> Tensor:
        if valid is not None:
            x = x.masked_fill(~valid[:, None, :, None], 0)
        # In fp64, so that padding, which changes the order of the sum, does not change the order of the channels.
        return torch.linalg.vector_norm(x, 1, dim=2, dtype=torch.float64)

    return AbsoluteSums(total(q), total(k))


@dataclass(frozen=True)
class LargestQueries(KeptStatistic):
    """The largest absolute query of each channel, over a KV head's query heads and all prompts, for codecs.

    Attributes:
        absmax: [B, H, D] fp32; None before a prompt.
    """

    absmax: Tensor | None = None
    of_readers: ClassVar[bool] = True
    file_name: ClassVar[str] = "query_absmax"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The largest queries."""
        return () if self.absmax is None else (self.absmax,)

    def added(self, tile: Tile) -> LargestQueries:
        """The largest of these queries and those before."""
        largest = largest_queries(tile.queries, tile.keys.shape[1], tile.valid)
        return LargestQueries(largest if self.absmax is None else self.absmax.maximum(largest))

    def joined(self, later: Any, columns: int) -> LargestQueries:
        """The larger of both."""
        if self.absmax is None or later.absmax is None:
            return self if later.absmax is None else later
        return LargestQueries(torch.stack([self.absmax, later.absmax]).amax(0))

    def beside(self, other: Any, heads: int) -> LargestQueries:
        """The larger of both layers, which have the same KV heads."""
        return self.joined(other, 0)

    def kept(self, held: Tensor, ranks: Ranks) -> Tensor:
        """The larger of these and those of earlier prompts."""
        if self.absmax is None:
            return held
        # Ranks that replicate a KV head have different queries of it, and must still write the same codes.
        return torch.maximum(held, ranks.largest(self.absmax))

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> LargestQueries:
        """The same with `fn` of the largest queries."""
        return LargestQueries(None if self.absmax is None else fn(self.absmax))


@dataclass(frozen=True)
class QuerySquares(NewestWindow[None], KeptStatistic):
    """The mean square of each channel of a prompt's newest queries, over a KV head's query heads, for codecs.

    Attributes:
        width: How many of each row.
        window: The queries so far; None before a prompt.
    """

    width: int
    window: QueryWindow | None = None
    reads_past: ClassVar[bool] = False
    of_attention: ClassVar[bool] = False
    file_name: ClassVar[str] = "query_square"

    def kept(self, held: Tensor, ranks: Ranks) -> Tensor:
        """The mean squares of this prompt; a row without a query in it keeps what it has."""
        square, seen = self.mean(ranks, held.shape[1])
        return torch.where(seen[:, None, None], square, held)

    def working(self, sizes: Sizes) -> Working:
        """None that count: no attention is computed."""
        return Working()

    def mean(self, ranks: Ranks, heads: int) -> tuple[Tensor, Tensor]:
        """The mean square of each channel over the queries of a KV head, and which rows have a query.

        Args:
            ranks: The ranks that hold the other query heads of these KV heads.
            heads: KV heads.

        Returns:
            [B, H, D] fp32, 0 in rows without a query; and [B] bool.
        """
        assert self.window is not None
        queries, at = self.window
        there = at >= 0
        # In fp64, so that it does not matter how many absent queries stand between the others.
        square = queries.double().square().masked_fill(~there[:, None, :, None], 0).sum(2)
        mean = square / there.sum(-1).clamp_min(1)[:, None, None]
        return ranks.group_mean(mean.unflatten(1, (heads, -1))).float(), there.any(-1)


@dataclass(frozen=True)
class ChannelSums(Statistic[None]):
    """Sums of absolute queries and keys, for readers with `ReaderTraits.salience`.

    Attributes:
        sums: The sums; None before a prompt.
    """

    sums: AbsoluteSums | None = None
    of_readers: ClassVar[bool] = True

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The sums of queries and of keys."""
        return self.sums or ()

    def added(self, tile: Tile) -> ChannelSums:
        """Add the tokens of a tile."""
        sums = absolute_sums(tile.queries, tile.keys, tile.valid)
        return ChannelSums(sums if self.sums is None else self.sums.plus(sums))

    def joined(self, later: Any, columns: int) -> ChannelSums:
        """The sums over the tokens of both."""
        if self.sums is None or later.sums is None:
            return self if later.sums is None else later
        return ChannelSums(self.sums.plus(later.sums))

    def beside(self, other: Any, heads: int) -> ChannelSums:
        """The sums of the queries of both layers, which have the same keys."""
        assert self.sums is not None and other.sums is not None
        return ChannelSums(self.sums._replace(queries=together(self.sums.queries, other.sums.queries, heads)))

    def reduced(self, context: Context) -> None:
        """Nothing that a selector sees."""

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> ChannelSums:
        """The same with `fn` of the sums."""
        return replace(self, sums=None if self.sums is None else AbsoluteSums(*map(fn, self.sums)))


def largest_queries(q: Tensor, heads: int, valid: Tensor | None) -> Tensor:
    """Largest absolute value of each channel over the valid queries [B, Hq, P, D] of a KV head, [B, H, D] fp32."""
    size = q.abs().float() if valid is None else q.abs().float().masked_fill(~valid[:, None, :, None], 0)
    return size.amax(2).unflatten(1, (heads, -1)).amax(2)
