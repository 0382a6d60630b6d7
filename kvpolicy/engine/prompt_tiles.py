"""A prompt that a layer takes in tiles: its keys, its values and its statistics, up to the newest tile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.attention import attend_tile
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.prompt_statistics import PromptStatistics
from kvpolicy.engine.shared_prefix import SharedPrefix
from kvpolicy.engine.shown_prompt import ShownPrompt
from kvpolicy.statistics import Forward
from kvpolicy.statistics.windows import Past, ScoreTransform


class PromptTiles:
    """The tiles of a prompt of P tokens so far. Every tensor is allocated for the whole prompt with the first tile.

    Args:
        like: The first tile's keys, [B, H, T, D].
        queries: Query heads.
        value_dim: Size of a value; 0 if none is held.
        columns: P.
        valid: Which of the P tokens are not padding, [B, P] bool; None if all are.
        past: Slots and held chunks before them; None if there are none.
        statistics: Statistics of the queries.
        attn_sum: Whether to sum the attention over the queries.
        prefix: Slots that every row attends to besides, or None.

    Attributes:
        valid: See above.
    """

    def __init__(
        self,
        like: Tensor,
        queries: int,
        value_dim: int,
        columns: int,
        valid: Tensor | None,
        past: Past | None,
        statistics: PromptStatistics,
        attn_sum: bool,
        prefix: SharedPrefix | None = None,
    ) -> None:
        """Allocate; nothing was attended to yet."""
        batch, heads, _, dim = like.shape
        self._before = 0 if past is None else past.keys.shape[2]
        size = self._before + columns
        self._keys = like.new_empty(batch, heads, size, dim)
        self._values = like.new_empty(batch, heads, size, value_dim)
        if past is not None:
            self._keys[:, :, : self._before] = past.keys
            self._values[:, :, : self._before] = past.values
            # Of the past itself, only which slots it has is still needed.
            past = past._replace(keys=self._keys[:, :, : self._before], values=self._values[:, :, : self._before])
        self._past = past
        self._prefix = prefix
        self._columns = columns
        self._seen = 0
        self.valid = valid
        self._statistics = statistics
        self._attn_sum = (
            torch.zeros(batch, queries, size, device=like.device, dtype=torch.float32) if attn_sum else None
        )
        self._forward: Forward | None = None

    def shown(self, layer: LayerContents, pending: PendingPrompt, held: PendingPrompt | None) -> ShownPrompt:
        """The prompt as later layers read it, once all tiles have come; see `LayerStore.show_prompt`."""
        return ShownPrompt(layer, self._keys, self._values, self._past, pending, held, self._prefix)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, transform: ScoreTransform, scores: Tensor | None = None
    ) -> Tensor:
        """Attend from the next tile, [B, Hq, T, D].

        Args:
            q: [B, Hq, T, D].
            k: [B, H, T, D].
            v: [B, H, T, D].
            transform: From products to attention weights.
            scores: Scores of the tile by the input of the layer, [B, H, T] fp32, if the selector needs them.
        """
        start = self._seen
        stop = self._seen + q.shape[2]
        end = self._before + stop
        self._keys[:, :, self._before + start : end] = k.detach()
        self._values[:, :, self._before + start : end] = v.detach()
        self._statistics.add(q.detach(), k.detach(), start, scores)
        valid = None if self.valid is None else self.valid[:, :stop]
        self._seen = stop
        keys = self._keys[:, :, :end]
        values = self._values[:, :, :end]
        beside = None if self._prefix is None else self._prefix.attend_prompt(q, transform)
        return attend_tile(q, keys, values, transform, self._past, valid, self._attn_sum, beside)

    def note_forward(self, forward: Forward, queries: Tensor, whole: Mapping[str, Any]) -> None:
        """Keep the inputs of the attention module for the newest tile.

        Args:
            forward: Its arguments.
            queries: The queries of the tile, [B, Hq, T, D].
            whole: Its other arguments by name, as they are for the whole prompt.
        """
        if self._forward is None:
            hidden = forward.hidden_states
            others = {name: whole.get(name, value) for name, value in forward.kwargs.items()}
            self._forward = forward._replace(
                hidden_states=hidden.new_empty(hidden.shape[0], self._columns, hidden.shape[2]),
                queries=queries.new_empty(*queries.shape[:2], self._columns, queries.shape[3]),
                kwargs=others,
                valid=self.valid,
            )
        at = slice(self._seen - queries.shape[2], self._seen)
        assert self._forward.queries is not None
        self._forward.hidden_states[:, at] = forward.hidden_states
        self._forward.queries[:, :, at] = queries.detach()

    def prompt(self, transform: ScoreTransform) -> PendingPrompt:
        """The prompt, once the last tile was attended to."""
        keys, values = (t[:, :, self._before :] for t in (self._keys, self._values))
        return self._statistics.prompt(keys, values, transform, self._forward, self._attn_sum)
