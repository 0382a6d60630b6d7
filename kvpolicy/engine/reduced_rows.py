"""Rows of attention that a selector reduces by itself, a few at a time, without an N x N matrix: `Seen.reduced`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.attention import QueryWindow, newest_columns, window_attention, window_tiles
from kvpolicy.engine.statistic import Candidates, Coming, WindowStatistic
from kvpolicy.protocols import AttentionRows, RowReducer


@dataclass(frozen=True)
class ReducedRows(WindowStatistic):
    """The attention of every query, as the selector reduces it. The queries are held until the budget is known.

    Attributes:
        reducer: Reduces rows.
        window: The queries so far; None before a prompt.
    """

    reducer: RowReducer
    window: QueryWindow | None = None

    def columns(self, coming: Coming) -> Tensor:
        """All columns."""
        return newest_columns(coming.valid, coming.shape, coming.columns, coming.seen.device)

    def reduced(self, candidates: Candidates) -> Mapping[str, Any]:
        """The sum of what the rows are reduced to."""
        assert self.window is not None
        keys = candidates.keys
        valid = candidates.valid
        transform = candidates.transform
        past = candidates.past
        positions = candidates.positions
        batch, heads = self.window.queries.shape[:2]
        slots = 0 if past is None else past.keys.shape[2]
        total = keys.new_zeros(batch, heads, positions.shape[-1], dtype=torch.float32)
        at = positions[:, 0, slots:].long().gather(1, self.window.at.clamp_min(0))
        at = torch.where(self.window.at < 0, -1, at)
        for part, tile in window_tiles(self.window, total.shape[2]):
            # Queries are in the order of their columns: no key behind the last one is seen by any of the tile.
            new = int(tile.at.max()) + 1
            if not new:
                continue
            flags = None if valid is None else valid[:, :new]
            weights = window_attention(tile, keys[:, :, :new], transform, past, flags)
            seen = slots + new
            rows = AttentionRows(weights, at[:, part], positions[..., :seen], candidates.layer_idx, candidates.ranks)
            total[..., :seen] += self.reducer.reduce(rows)
        return {"reduced": total}
