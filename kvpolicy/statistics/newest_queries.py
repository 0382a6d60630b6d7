"""The newest queries of a prompt, as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kvpolicy.statistics.statistic import Context, Sizes, Working
from kvpolicy.statistics.window_statistic import NewestWindow
from kvpolicy.statistics.windows import QueryWindow


@dataclass(frozen=True)
class NewestQueries(NewestWindow[Tensor]):
    """The newest queries as attention takes them, [B, Hq, W, D]; any where a batch row has fewer.

    Attributes:
        width: How many of each row.
        window: The queries so far; None before a prompt.
    """

    width: int
    window: QueryWindow | None = None
    reads_past: ClassVar[bool] = False
    of_readers: ClassVar[bool] = False
    of_attention: ClassVar[bool] = False

    def described(self) -> str:
        """How many."""
        return f"the last {self.width:,} queries"

    def beside(self, other: Any, heads: int) -> NewestQueries:
        """The layer's own: a selector may hold queries of each of its query heads."""
        return self

    def reduced(self, context: Context) -> Tensor:
        """The queries, the newest last."""
        assert self.window is not None
        return self.window.queries

    def working(self, sizes: Sizes) -> Working:
        """Scores of the queries, their weights, and what is pooled of them."""
        return Working(chosen=3 * 4 * min(self.width, sizes.columns) * sizes.scores)
