"""The attention of the newest queries of a prompt, for selectors, mergers and allocators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.statistics.statistic import Context, Sizes, Working, by_head
from kvpolicy.statistics.window_statistic import NewestWindow
from kvpolicy.statistics.windows import QueryWindow, weights_and_sinks, window_scores


class WindowAttention(NamedTuple):
    """Attention rows of the newest W valid queries, the newest last; rows of zeros where a batch row has fewer.

    Attributes:
        weights: [B, Hq, W, N] fp32.
        sinks: The weight of the learned sink in each row, [B, Hq, W] fp32; None if there is none.
    """

    weights: Tensor
    sinks: Tensor | None = None

    def sum(self, window: Tensor) -> Tensor:
        """Attention summed over each row's newest `window` [B] queries, [B, Hq, N]."""
        width = self.weights.shape[2]
        age = torch.arange(width - 1, -1, -1, device=self.weights.device)
        weight = (age < window[:, None]).to(self.weights.dtype)  # [B, W]
        return (weight[:, None, None] @ self.weights).squeeze(2)


@dataclass(frozen=True)
class RecentQueries(NewestWindow[WindowAttention]):
    """The newest queries, and their attention to all candidates.

    Attributes:
        width: How many of each row.
        window: The queries so far; None before a prompt.
    """

    width: int
    window: QueryWindow | None = None

    def described(self) -> str:
        """Their attention weights."""
        queries = "last query" if self.width == 1 else f"last {self.width:,} queries"
        return f"the attention weights of the {queries} of the prompt"

    def reduced(self, context: Context) -> WindowAttention:
        """Attention rows of the queries."""
        assert self.window is not None
        score = window_scores(self.window, context.keys, context.transform, context.past, context.valid)
        return WindowAttention(*weights_and_sinks(self.window, score, context.transform))

    def reordered(self, result: WindowAttention, order: Tensor) -> WindowAttention:
        """With the candidates of each row in another order."""
        return result._replace(weights=by_head(result.weights, order))

    def working(self, sizes: Sizes) -> Working:
        """None: the rows of all parts are counted together; see `planning.activations`."""
        return Working()
