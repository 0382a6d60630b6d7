"""The attention of the newest queries of a prompt, `Seen.window_attn`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kvpolicy.engine.attention import QueryWindow, newest_columns, window_attention
from kvpolicy.engine.statistic import (
    Candidates,
    Coming,
    Tile,
    added_window,
    begun_window,
    joined_windows,
    map_window,
    newest_of,
)


@dataclass(frozen=True)
class RecentQueries:
    """The newest queries, and their attention to all candidates.

    Attributes:
        width: How many of each row.
        window: The queries so far; None before a prompt.
    """

    width: int
    window: QueryWindow | None = None

    reads_past = True

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The queries and their columns."""
        return self.window or ()

    def begun(self, coming: Coming) -> RecentQueries:
        """Choose the newest columns."""
        at = newest_columns(coming.valid, coming.shape, self.width, coming.seen.device)
        return replace(self, window=begun_window(at))

    def added(self, tile: Tile) -> RecentQueries:
        """Keep the chosen queries of a tile."""
        assert self.window is not None
        return replace(self, window=added_window(self.window, tile))

    def joined(self, later: RecentQueries, columns: int) -> RecentQueries:
        """The newest queries of both."""
        assert self.window is not None and later.window is not None
        return replace(self, window=newest_of(joined_windows(self.window, later.window, columns), self.width))

    def reduced(self, candidates: Candidates) -> Mapping[str, Any]:
        """Attention rows of the queries."""
        assert self.window is not None
        keys, valid, transform, past, _ = candidates
        return {"window_attn": window_attention(self.window, keys, transform, past, valid)}

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> RecentQueries:
        """The same with `fn` of every tensor."""
        assert self.window is not None
        return replace(self, window=map_window(self.window, fn))
