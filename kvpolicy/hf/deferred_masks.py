"""Masks of sliding windows that are made tile by tile.

That of a whole prompt would have an element for every pair of its tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

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
