"""Keys and values that a layer passes to later layers by its kind (Gemma 3n, Gemma 4), where layers take tiles.

A layer passes those that the newest tile saw. Those of all tiles are put together in a tuple, of which a later layer is
given the pair of the same tile.
"""

from __future__ import annotations

from collections.abc import Generator, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

SHARED = "shared_kv_states"
"""The argument of layers through which they pass keys."""


def passes_by_kind(attention: nn.Module) -> bool:
    """Whether an attention module passes keys to later ones of its kind, or reads those of an earlier one."""
    return hasattr(attention, "is_kv_shared_layer")


def _key(attention: nn.Module) -> Any:
    """Under what the keys of a module's owner are passed: its kind, or its index in Gemma 3n of transformers 5.18."""
    index = getattr(attention, "kv_shared_layer_index", None)
    return getattr(attention, "layer_type", None) if index is None else index


class TiledKeys:
    """The keys that layers pass on, while one of them takes its tiles.

    Attributes:
        length: The keys that the layer is given for its newest tile; None if it has its own.
    """

    def __init__(self, attention: nn.Module, passed: MutableMapping[Any, tuple[Tensor, ...]] | None) -> None:
        """Keys that earlier layers have passed to one with an attention module; None if layers pass none."""
        self._reads = _key(attention) if getattr(attention, "is_kv_shared_layer", False) else None
        self._passed = passed
        self._tiles = 0
        self._new: dict[Any, list[Tensor]] = {}
        self.length: int | None = None

    @contextmanager
    def next_tile(self) -> Generator[dict[str, Any]]:
        """The arguments of the next tile through which keys are passed."""
        if self._passed is None:
            yield {}
            return
        of_tile = slice(2 * self._tiles, 2 * self._tiles + 2)
        given = {kind: pairs[of_tile] for kind, pairs in self._passed.items()}
        self.length = None if self._reads is None else given[self._reads][0].shape[2]
        make: Any = type(self._passed)
        part = make(given)
        yield {SHARED: part}
        for kind, pair in part.items():
            if pair is not given.get(kind):
                self._new.setdefault(kind, []).extend(pair)
        self._tiles += 1

    def join(self) -> None:
        """Pass on what the layer has passed in all its tiles."""
        if self._passed is not None:
            self._passed.update({kind: tuple(pairs) for kind, pairs in self._new.items()})
