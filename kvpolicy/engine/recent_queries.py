"""The attention of the newest queries of a prompt, `Seen.window_attn` and `Seen.window_sinks`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvpolicy.engine.attention import QueryWindow, newest_columns, weights_and_sinks, window_scores
from kvpolicy.engine.statistic import Candidates, Coming, WindowStatistic, newest_of


@dataclass(frozen=True)
class RecentQueries(WindowStatistic):
    """The newest queries, and their attention to all candidates.

    Attributes:
        width: How many of each row.
        window: The queries so far; None before a prompt.
    """

    width: int
    window: QueryWindow | None = None

    def columns(self, coming: Coming) -> Tensor:
        """The newest columns."""
        return newest_columns(coming.valid, coming.shape, self.width, coming.seen.device)

    def newest(self, window: QueryWindow) -> QueryWindow:
        """As many as in one piece."""
        return newest_of(window, self.width)

    def reduced(self, candidates: Candidates) -> Mapping[str, Any]:
        """Attention rows of the queries."""
        assert self.window is not None
        keys, valid, transform, past = candidates[:4]
        score = window_scores(self.window, keys, transform, past, valid)
        weights, sinks = weights_and_sinks(self.window, score, transform)
        return {"window_attn": weights, "window_sinks": sinks}
