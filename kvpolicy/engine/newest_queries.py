"""The newest queries of a prompt, as they are, `Seen.queries`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvpolicy.engine.attention import QueryWindow, newest_columns
from kvpolicy.engine.statistic import Candidates, Coming, WindowStatistic, newest_of


@dataclass(frozen=True)
class NewestQueries(WindowStatistic):
    """The newest queries, which the selector multiplies with keys by itself.

    Attributes:
        width: How many of each row.
        window: The queries so far; None before a prompt.
    """

    width: int
    window: QueryWindow | None = None

    @property
    def reads_past(self) -> bool:
        """Nothing is computed of them here."""
        return False

    def columns(self, coming: Coming) -> Tensor:
        """The newest columns."""
        return newest_columns(coming.valid, coming.shape, self.width, coming.seen.device)

    def newest(self, window: QueryWindow) -> QueryWindow:
        """As many as in one piece."""
        return newest_of(window, self.width)

    def beside(self, other: NewestQueries, heads: int) -> NewestQueries:
        """The layer's own: a selector may hold queries of each of its query heads."""
        return self

    def reduced(self, candidates: Candidates) -> Mapping[str, Any]:
        """The queries, and what they are used with."""
        assert self.window is not None
        return {"queries": self.window.queries, "added": candidates.added, "scale": candidates.transform.scale}
