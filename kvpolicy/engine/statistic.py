"""Protocol of the statistics of a prompt: gathered tile by tile, joined over chunks, and reduced for the selector.

Each statistic is one file: `attention_sum.py`, `recent_queries.py`, `probing.py`, `below_mean.py`, `decayed_sum.py`,
`reduced_rows.py`, `newest_queries.py`, `query_moments.py`, `block_attention.py`, `birth_scores.py` and
`channel_sums.py`. `prompt_statistics.py` says which parts of a policy ask for which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from kvpolicy.engine.attention import Past, QueryWindow, ScoreTransform, take_queries
from kvpolicy.engine.joint_heads import together
from kvpolicy.engine.rotary import Rope
from kvpolicy.protocols import SINGLE_RANK, Ranks

Self = TypeVar("Self")


class Coming(NamedTuple):
    """A prompt of P tokens that comes in one piece or in tiles.

    Attributes:
        valid: Which of the tokens are not padding, [B, P] bool; None if all are.
        columns: P.
        seen: Tokens that each row has seen before, [B] int64.
        rope: The rotary embedding of the layer, if the selector needs queries or keys without it.
    """

    valid: Tensor | None
    columns: int
    seen: Tensor
    rope: Rope | None

    @property
    def shape(self) -> tuple[int, int]:
        """B and P."""
        return self.seen.shape[0], self.columns


class Tile(NamedTuple):
    """Some tokens of a prompt.

    Attributes:
        queries: [B, Hq, T, D].
        keys: [B, H, T, D].
        start: Column of the first of them.
        valid: Which of them are not padding, [B, T] bool; None if all are.
        is_whole: Whether they are the whole prompt.
        scores: Scores by the input of the layer, [B, H, T] fp32; None unless `Needs.layer_input`.
    """

    queries: Tensor
    keys: Tensor
    start: int
    valid: Tensor | None
    is_whole: bool
    scores: Tensor | None = None


class Candidates(NamedTuple):
    """The tokens that a statistic is reduced over: past slots, and the new tokens of a prompt.

    Attributes:
        keys: Keys of the new tokens, [B, H, P, D].
        valid: Which of them are not padding, [B, P] bool; None if all are.
        transform: From products to attention weights.
        past: Every slot, decoded; None if there are none or no statistic reads them.
        added: New tokens of each row, [B] int64.
        positions: Positions of slots and new tokens, [B, H, S + P] int32, -1 for none.
        layer_idx: Index of the layer.
        ranks: The ranks that hold the model's other heads.
    """

    keys: Tensor
    valid: Tensor | None
    transform: ScoreTransform
    past: Past | None
    added: Tensor
    positions: Tensor
    layer_idx: int = 0
    ranks: Ranks = SINGLE_RANK


class Statistic(Protocol):
    """A statistic of a prompt. It is never changed: all methods return a new one."""

    @property
    def reads_past(self) -> bool:
        """Whether `reduced` needs the keys of the slots before the prompt."""
        ...

    @property
    def tensors(self) -> Iterable[Tensor]:
        """Its tensors, to count their bytes."""
        ...

    def begun(self: Self, coming: Coming) -> Self:
        """The statistic before the first tile of a prompt."""
        ...

    def added(self: Self, tile: Tile) -> Self:
        """The statistic with the next tile."""
        ...

    def joined(self: Self, later: Self, columns: int) -> Self:
        """This statistic and that of the next chunk of the prompt, which begins after `columns` columns."""
        ...

    def beside(self: Self, other: Self, heads: int) -> Self:
        """This statistic with the query heads of another layer that reads the same keys, of `heads` KV heads.

        Those of each KV head stand together, those of the other layer last. Queries themselves are not joined, as a
        selector may hold some of each query head of its layer; what they attend to is.
        """
        ...

    def reduced(self, candidates: Candidates) -> Mapping[str, Any]:
        """Fields of `kvpolicy.protocols.Seen`."""
        ...

    def map_rows(self: Self, fn: Callable[[Tensor], Tensor]) -> Self:
        """The same with `fn` of every per-row tensor, which selects or repeats rows."""
        ...


class WindowStatistic(Statistic, Protocol):
    """A statistic of some queries, which are chosen before the prompt comes; a frozen dataclass with a field `window`.

    A subclass says which queries they are, by `columns`, and what they are reduced to.

    Attributes:
        window: The queries so far; None before a prompt.
    """

    window: QueryWindow | None

    @property
    def reads_past(self) -> bool:
        """Attention to past slots needs their keys."""
        return True

    def columns(self, coming: Coming) -> Tensor:
        """Columns of the queries in a prompt, [B, W] int64, -1 for none."""
        ...

    def newest(self, window: QueryWindow) -> QueryWindow:
        """Those of the queries of two chunks that are kept; by default all."""
        return window

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The queries and their columns."""
        return self.window or ()

    def begun(self: Any, coming: Coming) -> Any:
        """Choose the queries."""
        return replace(self, window=begun_window(self.columns(coming)))

    def added(self: Any, tile: Tile) -> Any:
        """Keep the chosen queries of a tile."""
        return replace(self, window=added_window(self.window, tile))

    def joined(self: Any, later: Any, columns: int) -> Any:
        """The queries of both."""
        return replace(self, window=self.newest(joined_windows(self.window, later.window, columns)))

    def beside(self: Any, other: Any, heads: int) -> Any:
        """The queries of both layers, which are of the same columns."""
        queries = together(self.window.queries, other.window.queries, heads)
        return replace(self, window=QueryWindow(queries, self.window.at))

    def map_rows(self: Any, fn: Callable[[Tensor], Tensor]) -> Any:
        """The same with `fn` of every tensor."""
        return replace(self, window=map_window(self.window, fn))


def begun_window(at: Tensor) -> QueryWindow:
    """A window of the columns `at` [B, W], without queries yet."""
    return QueryWindow(at.new_empty(0), at)


def added_window(window: QueryWindow, tile: Tile) -> QueryWindow:
    """A window with those of its queries that are in a tile."""
    queries, at = window
    stop = tile.start + tile.queries.shape[2]
    if tile.is_whole:
        return QueryWindow(take_queries(tile.queries, at), at)
    if not queries.numel():
        queries = tile.queries.new_zeros(*tile.queries.shape[:2], at.shape[1], tile.queries.shape[3])
    inside = (at >= tile.start) & (at < stop)
    if bool(inside.any()):
        taken = take_queries(tile.queries, torch.where(inside, at - tile.start, -1))
        queries = torch.where(inside[:, None, :, None], taken, queries)
    return QueryWindow(queries, at)


def joined_windows(first: QueryWindow, second: QueryWindow, columns: int) -> QueryWindow:
    """Queries of two chunks, the second of which begins after `columns` columns."""
    # An absent query stays at -1: if it were shifted, it would stand at the last column of the first chunk.
    at = torch.where(second.at < 0, -1, second.at + columns)
    return QueryWindow(torch.cat([first.queries, second.queries], 2), torch.cat([first.at, at], 1))


def newest_of(window: QueryWindow, width: int) -> QueryWindow:
    """The newest `width` queries of a window, absent ones first."""
    order = (window.at >= 0).to(torch.uint8).argsort(dim=-1, stable=True)[:, -width:]
    index = order[:, None, :, None].expand(-1, window.queries.shape[1], -1, window.queries.shape[-1])
    return QueryWindow(window.queries.gather(2, index), window.at.gather(1, order))


def map_window(window: QueryWindow, fn: Callable[[Tensor], Tensor]) -> QueryWindow:
    """A window with `fn` of its tensors."""
    return QueryWindow(fn(window.queries), fn(window.at))
