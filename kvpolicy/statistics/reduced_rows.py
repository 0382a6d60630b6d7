"""Rows of attention that a selector reduces by itself, a few at a time, without an N x N matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from kvpolicy.statistics.ranks import SINGLE_RANK, Ranks
from kvpolicy.statistics.statistic import SCORE_NBYTES, Coming, Context, Sizes, Working
from kvpolicy.statistics.window_statistic import WindowStatistic
from kvpolicy.statistics.windows import QueryWindow


class AttentionRows(NamedTuple):
    """The attention of a few queries of a prompt, in tiles of which a selector reduces it.

    Attributes:
        weights: Over slots and new tokens, [B, Hq, W, N] fp32; rows of zeros where a batch row has fewer queries.
        queries: Position of each query in its row, [B, W] int64, -1 for none.
        positions: Position of each token, [B, H, N] int32, -1 for none; in any order.
        layer_idx: Index of the layer.
        ranks: The ranks that hold the model's other heads.
    """

    weights: Tensor
    queries: Tensor
    positions: Tensor
    layer_idx: int = 0
    ranks: Ranks = SINGLE_RANK


class RowReducer(Protocol):
    """Reduces the attention of all queries of a prompt, which it sees a few at a time, to a number of each token."""

    def reduce(self, rows: AttentionRows) -> Tensor:
        """A number of each token, [B, Hq, N] fp32; those of all queries are added."""
        ...


@dataclass(frozen=True)
class ReducedRows(WindowStatistic[Tensor]):
    """The attention of every query, as the selector reduces it. The queries are held until the budget is known.

    Attributes:
        reducer: Reduces rows.
        window: The queries so far; None before a prompt.
    """

    reducer: RowReducer
    window: QueryWindow | None = None
    along: ClassVar = "heads"
    words: ClassVar[str] = "the attention weights of all queries, which the selector reduces by itself"

    def columns(self, coming: Coming) -> Tensor:
        """All columns."""
        return coming.newest(coming.columns)

    def reduced(self, context: Context) -> Tensor:
        """The sum of what the rows are reduced to."""
        assert self.window is not None
        at = context.positions[:, 0, context.slots :].long().gather(1, self.window.at.clamp_min(0))
        at = torch.where(self.window.at < 0, -1, at)

        def reduced(weights: Tensor, part: slice, tile: QueryWindow) -> Tensor:
            positions = context.positions[..., : weights.shape[-1]]
            return self.reducer.reduce(AttentionRows(weights, at[:, part], positions, context.layer_idx, context.ranks))

        return self.summed(context, reduced)

    def working(self, sizes: Sizes) -> Working:
        """All queries, and a tile of their weights with 64-bit integers of each."""
        held = sizes.tokens * sizes.widest * sizes.itemsize
        tile = sizes.scores * (sizes.tile_rows * (SCORE_NBYTES + 4 * 4) + 16)
        return Working(held, held + sizes.joined + tile)
