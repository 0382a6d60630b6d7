"""Statistics of the channels of a prompt's queries and keys, for codecs and readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.attention import QueryWindow, newest_columns
from kvpolicy.engine.joint_heads import together
from kvpolicy.engine.reading import AbsoluteSums, absolute_sums
from kvpolicy.engine.statistic import Candidates, Coming, Tile, WindowStatistic, newest_of
from kvpolicy.protocols import Ranks


@dataclass(frozen=True)
class LargestQueries:
    """The largest absolute query of each channel, for codecs with `Traits.query_absmax`.

    Attributes:
        absmax: [B, H, D] fp32; None before a prompt.
    """

    absmax: Tensor | None = None

    reads_past = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The largest queries."""
        return () if self.absmax is None else (self.absmax,)

    def begun(self, coming: Coming) -> LargestQueries:
        """Nothing was seen."""
        return LargestQueries()

    def added(self, tile: Tile) -> LargestQueries:
        """The largest of these queries and those before."""
        largest = largest_queries(tile.queries, tile.keys.shape[1], tile.valid)
        return LargestQueries(largest if self.absmax is None else self.absmax.maximum(largest))

    def joined(self, later: LargestQueries, columns: int) -> LargestQueries:
        """The larger of both."""
        if self.absmax is None or later.absmax is None:
            return self if later.absmax is None else later
        return LargestQueries(torch.stack([self.absmax, later.absmax]).amax(0))

    def beside(self, other: LargestQueries, heads: int) -> LargestQueries:
        """The larger of both layers, which have the same KV heads."""
        return self.joined(other, 0)

    def reduced(self, candidates: Candidates) -> Mapping[str, Any]:
        """Nothing that a selector sees."""
        return {}

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> LargestQueries:
        """The same with `fn` of the largest queries."""
        return LargestQueries(None if self.absmax is None else fn(self.absmax))


@dataclass(frozen=True)
class QuerySquares(WindowStatistic):
    """The newest queries, for codecs with `Traits.query_squares`.

    Attributes:
        width: How many of each row.
        window: The queries so far; None before a prompt.
    """

    width: int
    window: QueryWindow | None = None

    @property
    def reads_past(self) -> bool:
        """Keys are not looked at."""
        return False

    def columns(self, coming: Coming) -> Tensor:
        """The newest columns."""
        return newest_columns(coming.valid, coming.shape, self.width, coming.seen.device)

    def newest(self, window: QueryWindow) -> QueryWindow:
        """As many as in one piece."""
        return newest_of(window, self.width)

    def reduced(self, candidates: Candidates) -> Mapping[str, Any]:
        """Nothing that a selector sees."""
        return {}

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
class ChannelSums:
    """Sums of absolute queries and keys, for readers with `ReaderTraits.salience`.

    Attributes:
        sums: The sums; None before a prompt.
    """

    sums: AbsoluteSums | None = None

    reads_past = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The sums of queries and of keys."""
        return self.sums or ()

    def begun(self, coming: Coming) -> ChannelSums:
        """Nothing was seen."""
        return ChannelSums()

    def added(self, tile: Tile) -> ChannelSums:
        """Add the tokens of a tile."""
        sums = absolute_sums(tile.queries, tile.keys, tile.valid)
        return ChannelSums(sums if self.sums is None else self.sums.plus(sums))

    def joined(self, later: ChannelSums, columns: int) -> ChannelSums:
        """The sums over the tokens of both."""
        if self.sums is None or later.sums is None:
            return self if later.sums is None else later
        return ChannelSums(self.sums.plus(later.sums))

    def beside(self, other: ChannelSums, heads: int) -> ChannelSums:
        """The sums of the queries of both layers, which have the same keys."""
        assert self.sums is not None and other.sums is not None
        return ChannelSums(self.sums._replace(queries=together(self.sums.queries, other.sums.queries, heads)))

    def reduced(self, candidates: Candidates) -> Mapping[str, Any]:
        """Nothing that a selector sees."""
        return {}

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> ChannelSums:
        """The same with `fn` of the sums."""
        return replace(self, sums=None if self.sums is None else AbsoluteSums(*map(fn, self.sums)))


def largest_queries(q: Tensor, heads: int, valid: Tensor | None) -> Tensor:
    """Largest absolute value of each channel over the valid queries [B, Hq, P, D] of a KV head, [B, H, D] fp32."""
    size = q.abs().float() if valid is None else q.abs().float().masked_fill(~valid[:, None, :, None], 0)
    return size.amax(2).unflatten(1, (heads, -1)).amax(2)
