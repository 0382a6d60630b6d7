"""A prompt of a layer with the slots before it, as later layers of the model read them while the layer's prompt waits.

Such layers have queries and no keys. They see what their owner saw: all of the prompt, before it is compressed.
"""

from __future__ import annotations

from torch import Tensor

from kvpolicy.engine.attention import Past, ScoreTransform, attend_tile
from kvpolicy.engine.host import on_host
from kvpolicy.engine.shared_prefix import SharedPrefix


class ShownPrompt:
    """The keys and values that new tokens may attend to in a layer.

    Args:
        keys: Keys of S slots and earlier chunks, and of P new tokens, [B, H, S + P, D].
        values: Their values, [B, H, S + P, D].
        past: What comes before the new tokens; None if nothing does.
        valid: Which of the P tokens are not padding, [B, P] bool; None if all are.
        prefix: Slots that every row attends to besides, or None.

    Attributes:
        columns: P.
        is_first: Whether the new tokens attend to each other alone, so that gradients may flow.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, past: Past | None, valid: Tensor | None, prefix: SharedPrefix | None
    ) -> None:
        """Show tensors, which are not changed."""
        self._keys = keys
        self._values = values
        self._before = 0 if past is None else past.occupied.shape[2]
        self._past = past
        self._valid = valid
        self._prefix = prefix
        self.columns: int = keys.shape[2] - self._before
        self.is_first: bool = past is None and prefix is None

    @on_host
    def attend(self, q: Tensor, transform: ScoreTransform, stop: int | None = None) -> Tensor:
        """Attend from the queries of the tokens before column `stop`, all P by default; nothing is changed.

        Args:
            q: Queries of the last of these tokens, [B, Hq, T, D].
            transform: From products to attention weights.
            stop: The column.

        Returns:
            [B, Hq, T, D].
        """
        stop = self.columns if stop is None else stop
        keys, values = (t[:, :, : self._before + stop] for t in (self._keys, self._values))
        valid = None if self._valid is None else self._valid[:, :stop]
        beside = None if self._prefix is None else self._prefix.attend_prompt(q, transform)
        return attend_tile(q, keys, values, transform, self._past, valid, None, beside)
