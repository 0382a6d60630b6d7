"""What selectors, mergers, codecs and readers must see of a prompt's queries, from one piece or tile by tile."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.attention import QueryWindow, ScoreTransform, largest_queries, newest_columns, take_queries
from kvpolicy.engine.partial_reads import LayerReading
from kvpolicy.engine.prefill import PendingPrompt, token_positions
from kvpolicy.engine.probing import probe_columns
from kvpolicy.engine.query_moments import mean_rotation, sum_moments
from kvpolicy.engine.reading import AbsoluteSums, absolute_sums
from kvpolicy.protocols import Forward, Needs, QueryMoments


def prompt_needs(store: LayerReading) -> Needs:
    """What the selector and the merger of a layer must see of a prompt."""
    return store.selector.needs | store.merger.needs


def see_prompt(
    store: LayerReading,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    transform: ScoreTransform,
    forward: Forward | None,
    held: PendingPrompt | None = None,
) -> PendingPrompt:
    """All that a layer must see of a prompt in one piece but sums of its attention; see `LayerStore.attend_prompt`."""
    statistics = PromptStatistics(store, valid, q.shape[2], held)
    statistics.add(q.detach(), k.detach(), 0)
    forward = None if forward is None else forward._replace(queries=q.detach())
    return statistics.prompt(k.detach(), v.detach(), transform, forward, None)


class PromptStatistics:
    """The statistics of a prompt of P tokens. Queries that are kept are chosen among all P before the first one comes.

    Args:
        store: The layer that takes the prompt, whose parts say what is to be seen.
        valid: Which of the tokens are not padding, [B, P] bool; None if all are.
        columns: P.
        held: Earlier chunks of the prompt, which are not compressed yet, or None.

    Attributes:
        absmax: Largest absolute query of each channel, [B, H, D] fp32, or None.
        sums: Sums of absolute queries and keys, or None.
        moments: Moments of the queries without their rotation, or None.
    """

    def __init__(
        self, store: LayerReading, valid: Tensor | None, columns: int, held: PendingPrompt | None = None
    ) -> None:
        """Nothing seen yet."""
        seen = store.length if held is None else held.lengths(store.length)
        self.absmax: Tensor | None = None
        self.sums: AbsoluteSums | None = None
        self.moments: QueryMoments | None = None
        self._store = store
        self._wants_absmax = store.limits is not None and store.codec.traits.query_absmax
        self._valid = valid
        self._columns = columns
        needs = self._needs = prompt_needs(store)
        shape = (seen.shape[0], columns)
        self._at: dict[str, Tensor] = {}
        if needs.window_queries:
            self._at["window"] = newest_columns(valid, shape, needs.window_queries, seen.device)
        if needs.below_mean_queries:
            self._at["below_mean"] = newest_columns(valid, shape, needs.below_mean_queries, seen.device)
        if needs.probes:
            self._at["probes"] = probe_columns(valid, shape, needs.probes, seen.device)
        self._queries: dict[str, Tensor] = {}
        self._positions = None if needs.query_moments is None else token_positions(valid, columns, seen)

    def add(self, q: Tensor, k: Tensor, start: int) -> None:
        """Take the tokens from column `start` on.

        Args:
            q: [B, Hq, T, D].
            k: [B, H, T, D].
            start: Column of the first of them.
        """
        heads = k.shape[1]
        stop = start + q.shape[2]
        valid = None if self._valid is None else self._valid[:, start:stop]
        for name, at in self._at.items():
            self._take(name, q, at, start)
        if self._wants_absmax:
            largest = largest_queries(q, heads, valid)
            self.absmax = largest if self.absmax is None else self.absmax.maximum(largest)
        if self._store.measures_salience:
            sums = absolute_sums(q, k, valid)
            self.sums = sums if self.sums is None else self.sums.plus(sums)
        first = self._needs.query_moments
        if first is not None and self._positions is not None:
            moments = sum_moments(q, heads, self._positions[:, start:stop], first, self._store.query_rope)
            if self.moments is not None:
                moments = QueryMoments(*(a + b for a, b in zip(self.moments, moments, strict=True)))
            self.moments = moments

    def _take(self, name: str, q: Tensor, at: Tensor, start: int) -> None:
        """Keep those queries of a tile that stand in the columns `at` [B, W]."""
        if q.shape[2] == self._columns:
            self._queries[name] = take_queries(q, at)
            return
        inside = (at >= start) & (at < start + q.shape[2])
        if name not in self._queries:
            self._queries[name] = q.new_zeros(*q.shape[:2], at.shape[1], q.shape[3])
        if bool(inside.any()):
            taken = take_queries(q, torch.where(inside, at - start, -1))
            self._queries[name] = torch.where(inside[:, None, :, None], taken, self._queries[name])

    def prompt(
        self, keys: Tensor, values: Tensor, transform: ScoreTransform, forward: Forward | None, attn_sum: Tensor | None
    ) -> PendingPrompt:
        """The prompt whose last token was seen.

        Args:
            keys: [B, H, P, D].
            values: [B, H, P, D].
            transform: From products to attention weights.
            forward: The arguments of the attention module, if the selector needs them.
            attn_sum: Attention summed over the queries, if it needs them.
        """
        return PendingPrompt(
            keys=keys,
            values=values,
            valid=self._valid,
            transform=transform,
            attn_sum=attn_sum,
            window=self._window("window"),
            probes=self._window("probes"),
            below_mean=self._window("below_mean"),
            moments=self.moments,
            mean_rotation=None if self.moments is None else mean_rotation(self._store.query_rope),
            query_absmax=self.absmax,
            forward=None if forward is None else forward._replace(valid=self._valid, **transform._asdict()),
            wants_vectors=self._needs.vectors,
            sums=self.sums,
        )

    def _window(self, name: str) -> QueryWindow | None:
        return QueryWindow(self._queries[name], self._at[name]) if name in self._at else None
