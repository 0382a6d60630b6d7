"""Statistics of some queries of a prompt, which are kept until tokens are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from kvpolicy.statistics.statistic import SCORE_NBYTES, Coming, Context, Result, Sizes, Statistic, Tile, Working
from kvpolicy.statistics.windows import QueryWindow, take_queries, together, window_attention, window_tiles


class WindowStatistic(Statistic[Result], Protocol[Result]):
    """A statistic of some queries, which are chosen before the prompt comes; it has a field `window`.

    A subclass says which queries they are, by `columns`, and what they are reduced to.

    Attributes:
        window: The queries so far; None before a prompt.
    """

    window: QueryWindow | None
    reads_past: ClassVar[bool] = True
    of_readers: ClassVar[bool] = True
    of_attention: ClassVar[bool] = True

    def columns(self, coming: Coming) -> Tensor:
        """Columns of the queries in a prompt, [B, W] int64, -1 for none."""
        ...

    def newest(self, window: QueryWindow) -> QueryWindow:
        """Those of the queries of two chunks that are kept; by default all."""
        return window

    @property
    def tensors(self) -> Iterable[Tensor]:
        """The queries and their columns."""
        return self.window or ()

    def begun(self: Any, coming: Coming) -> Any:
        """Choose the queries."""
        at = self.columns(coming)
        return replace(self, window=QueryWindow(at.new_empty(0), at))

    def added(self: Any, tile: Tile) -> Any:
        """Keep the chosen queries of a tile."""
        queries, at = self.window
        stop = tile.start + tile.queries.shape[2]
        if tile.is_whole:
            return replace(self, window=QueryWindow(take_queries(tile.queries, at), at))
        if not queries.numel():
            queries = tile.queries.new_zeros(*tile.queries.shape[:2], at.shape[1], tile.queries.shape[3])
        inside = (at >= tile.start) & (at < stop)
        if bool(inside.any()):
            taken = take_queries(tile.queries, torch.where(inside, at - tile.start, -1))
            queries = torch.where(inside[:, None, :, None], taken, queries)
        return replace(self, window=QueryWindow(queries, at))

    def joined(self: Any, later: Any, columns: int) -> Any:
        """The queries of both."""
        first = self.window
        second = later.window
        # An absent query stays at -1: if it were shifted, it would stand at the last column of the first chunk.
        at = torch.where(second.at < 0, -1, second.at + columns)
        both = QueryWindow(torch.cat([first.queries, second.queries], 2), torch.cat([first.at, at], 1))
        return replace(self, window=self.newest(both))

    def beside(self: Any, other: Any, heads: int) -> Any:
        """The queries of both layers, which are of the same columns."""
        queries = together(self.window.queries, other.window.queries, heads)
        return replace(self, window=QueryWindow(queries, self.window.at))

    def map_rows(self: Any, fn: Callable[[Tensor], Tensor]) -> Any:
        """The same with `fn` of every tensor."""
        return replace(self, window=QueryWindow(*map(fn, self.window)))

    def summed(self, context: Context, reduce: Callable[[Tensor, slice, QueryWindow], Tensor]) -> Tensor:
        """Reduce the attention rows of the queries a few at a time, without an N x N matrix: [B, Hq, N] fp32.

        Args:
            context: The tokens.
            reduce: Sums over some queries: fp32 weights [B, Hq, n, M] of all slots, and of the new tokens up to the
                newest of these queries; which of the queries they are, and the queries. It returns [B, Hq, M].
        """
        assert self.window is not None
        batch, heads = self.window.queries.shape[:2]
        total = context.keys.new_zeros(batch, heads, context.positions.shape[-1], dtype=torch.float32)
        for part, tile in window_tiles(self.window, total.shape[2]):
            # No key behind the newest query of a tile is seen by any of it.
            new = int(tile.at.max()) + 1
            if not new:
                continue
            valid = None if context.valid is None else context.valid[:, :new]
            weights = window_attention(tile, context.keys[:, :, :new], context.transform, context.past, valid)
            total[..., : context.slots + new] += reduce(weights, part, tile)
        return total

    def working(self, sizes: Sizes) -> Working:
        """A tile of attention rows and their sums."""
        return Working(reduced=sizes.joined + sizes.scores * (sizes.tile_rows * SCORE_NBYTES + 16))


class NewestWindow(WindowStatistic[Result], Protocol[Result]):
    """A statistic of the newest queries of each row, `width` of them."""

    width: int
    of_newest: ClassVar[bool] = True

    def columns(self, coming: Coming) -> Tensor:
        """The newest columns."""
        return coming.newest(self.width)

    def newest(self, window: QueryWindow) -> QueryWindow:
        """As many as in one piece."""
        return newest_of(window, self.width)

    def serving(self: Any, other: Any) -> Any:
        """The wider one."""
        return self if self.width >= other.width else other


def newest_of(window: QueryWindow, width: int) -> QueryWindow:
    """The newest `width` queries of a window, absent ones first."""
    order = (window.at >= 0).to(torch.uint8).argsort(dim=-1, stable=True)[:, -width:]
    index = order[:, None, :, None].expand(-1, window.queries.shape[1], -1, window.queries.shape[-1])
    return QueryWindow(window.queries.gather(2, index), window.at.gather(1, order))
