"""A prompt of a layer as later layers of the model read it, before it is compressed.

Such layers have queries and no keys. They see what their owner saw: all of the prompt, and the slots before it. What
their queries attend to counts where tokens are ranked: their heads join the groups of the owner's KV heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.attention import attend_tile
from kvpolicy.engine.host import on_host
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.prompt_statistics import PromptStatistics
from kvpolicy.engine.shared_prefix import SharedPrefix
from kvpolicy.statistics.windows import Past, ScoreTransform


class ShownPrompt:
    """A prompt of P tokens, with the keys and values that they may attend to in its layer.

    Args:
        layer: The layer.
        keys: Keys of S slots and earlier chunks, and of the new tokens, [B, H, S + P, D].
        values: Their values, [B, H, S + P, D].
        past: What comes before the new tokens; None if nothing does.
        pending: The prompt, with the statistics of the layer's own queries.
        held: Earlier chunks of it, which are not compressed yet, or None.
        prefix: Slots that every row attends to besides, or None.

    Attributes:
        pending: The prompt, with the statistics of the layers that have read it so far.
        is_first: Whether the new tokens attend to each other alone, so that gradients may flow.
    """

    def __init__(
        self,
        layer: LayerContents,
        keys: Tensor,
        values: Tensor,
        past: Past | None,
        pending: PendingPrompt,
        held: PendingPrompt | None,
        prefix: SharedPrefix | None,
    ) -> None:
        """Show tensors, which are not changed."""
        self._layer = layer
        self._keys = keys
        self._values = values
        self._past = past
        self._held = held
        self._prefix = prefix
        self._before = keys.shape[2] - pending.columns
        self._statistics: PromptStatistics | None = None
        self._sums: Tensor | None = None
        self.pending: PendingPrompt = pending
        self.is_first: bool = past is None and prefix is None

    @on_host
    def attend(self, q: Tensor, transform: ScoreTransform, stop: int | None = None) -> Tensor:
        """Attend from the queries of the tokens before column `stop`, all P by default.

        Args:
            q: Queries of the last of these tokens, [B, Hq, T, D].
            transform: From products to attention weights.
            stop: The column.

        Returns:
            [B, Hq, T, D].
        """
        columns = self.pending.columns
        stop = columns if stop is None else stop
        start = stop - q.shape[2]
        if start == 0 or self._statistics is None:
            self._begin(q)
        assert self._statistics is not None
        keys, values = (t[:, :, : self._before + stop] for t in (self._keys, self._values))
        self._statistics.add(q.detach(), keys[:, :, self._before + start :].detach(), start)
        valid = None if self.pending.valid is None else self.pending.valid[:, :stop]
        beside = None if self._prefix is None else self._prefix.attend_prompt(q, transform)
        out = attend_tile(q, keys, values, transform, self._past, valid, self._sums, beside)
        if stop == columns:
            self._end(transform)
        return out

    def _begin(self, q: Tensor) -> None:
        """Begin the statistics of a layer with its first queries [B, Hq, T, D]."""
        known = (self.pending.valid, self.pending.columns, self._held)
        self._statistics = PromptStatistics(self._layer, *known).of_reader()
        if self._layer.sums_attention:
            self._sums = q.new_zeros(*q.shape[:2], self._keys.shape[2], dtype=torch.float32)

    def _end(self, transform: ScoreTransform) -> None:
        """Join the statistics of a layer with those of the owner."""
        assert self._statistics is not None
        prompt = self._statistics.prompt(self.pending.keys, self.pending.values, transform, None, self._sums)
        self.pending = self.pending.beside(prompt)
        self._statistics = self._sums = None
