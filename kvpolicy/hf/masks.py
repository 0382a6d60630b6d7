"""Masks of a prompt that are more than padding: those of sliding windows, which are made tile by tile, and of pictures.

The mask of a window for a whole prompt would have an element for every pair of its tokens. Tokens of a picture see each
other, also later ones (Gemma 3): the model's own mask says which. The output of such a prompt is that of the stock
function under this mask. Statistics that rank tokens are of causal attention, as of every other prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.attention import ScoreTransform, attend

_thread = threading.local()


def defer_masks(defer: bool) -> None:
    """Say whether the forward that begins in this thread makes its masks of windows tile by tile."""
    _thread.defer = defer


def are_deferred() -> bool:
    """Whether the running forward makes its masks of windows tile by tile."""
    return getattr(_thread, "defer", False)


class DeferredMask:
    """The arguments of a mask that is made later, in place of the mask among the arguments of a layer.

    Args:
        make: The function of transformers that makes the mask.
        arguments: Its arguments for the whole prompt.
    """

    def __init__(self, make: Callable[..., Tensor | None], arguments: dict[str, Any]) -> None:
        """Keep the arguments."""
        self._make = make
        self._arguments = arguments

    def whole(self) -> Tensor | None:
        """The mask of the whole prompt."""
        return self._make(**self._arguments)

    def of_tile(self, start: int, stop: int, layer: Any) -> Tensor | None:
        """The mask [B, 1, T, window + T] of the new tokens `start` to `stop`, which a layer of the cache takes next."""
        return self._of(start, stop, *layer.get_mask_sizes(stop - start))

    def of_keys(self, start: int, stop: int, length: int) -> Tensor | None:
        """The mask [B, 1, T, length] of the new tokens `start` to `stop` for keys that end with those of the last."""
        end = self._arguments.get("q_offset", 0) + stop
        return self._of(start, stop, length, end - length)

    def _of(self, start: int, stop: int, length: int, offset: Any) -> Tensor | None:
        sizes = {
            "q_length": stop - start,
            "q_offset": self._arguments.get("q_offset", 0) + start,
            "kv_length": length,
            "kv_offset": offset,
        }
        return self._make(**self._arguments | sizes)


Stock = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attends under the model's own mask: queries, keys and values [B, H, P, D] to an output [B, P, Hq, D]."""


def is_token(mask: Tensor) -> Tensor:
    """Which of P tokens are not padding, [B, P] bool, by a mask [B, 1, P, P] of bool or of numbers that are added."""
    diagonal = mask[:, 0].diagonal(dim1=-2, dim2=-1)
    return diagonal if diagonal.dtype == torch.bool else diagonal == 0


def hides_padding(mask: Tensor, seen: Tensor) -> bool:
    """Whether a mask [B, 1, P, N], P < N, is causal and hides only padding behind rows of `seen` [B] tokens."""
    new, columns = mask.shape[-2:]
    if new == columns:
        return False
    shown = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
    last = shown[:, -1]
    causal = torch.ones(new, columns, dtype=torch.bool, device=mask.device).tril(columns - new)
    same = (shown == (last[:, None] & causal)).all(-1) | ~is_token(mask[..., -new:])
    earlier = last[:, : columns - new].sum(-1) == seen.to(mask.device)
    return bool(same.all()) and bool(earlier.all())


def under_mask(stock: Stock) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Attention as `LayerStore.attend_new` takes it, whose output is that of the stock function."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, transform: ScoreTransform, past: None, valid: Tensor, sums: bool, *rest: Any
    ) -> tuple[Tensor, Tensor | None]:
        out = stock(q, k, v).transpose(1, 2).masked_fill(~valid[:, None, :, None], 0)
        return out, attend(q, k, v, transform, past, valid, True)[1] if sums else None

    return attention
