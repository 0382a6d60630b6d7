"""A cache that stores nothing: it answers attention from the layers of another cache, which stay as they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer, LinearAttentionLayer

from kvpolicy.hf.cache_names import DummyLayer
from kvpolicy.hf.latent import TakesLatents
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.shared_keys import ReadingLayer
from kvpolicy.hf.states import SlotsAndState, StateLayer, States, WindowAndState
from kvpolicy.hf.tiles import TiledCache
from kvpolicy.statistics import Forward
from kvpolicy.statistics.windows import ScoreTransform


class PassingCache(TiledCache):
    """Base of caches that a forward takes to read the layers of another cache.

    Attributes:
        wants_inputs: Whether `attend` is given the inputs of the attention modules.
        takes_tiles: Whether `attend` may be called for one tile after the other.
    """

    wants_inputs: bool = False
    takes_tiles: bool = False

    def __init__(self, layers: Sequence[Any], rows: int | None = None) -> None:
        """A view of a cache's layers.

        Args:
            layers: The layers.
            rows: Rows of the forwards, if each is a copy of the one row of the layers.
        """
        self.held = layers
        self._rows = rows
        super().__init__(layers=[self._view(layer) for layer in layers])

    def manages(self, layer_idx: int) -> bool:
        """Whether a layer is under the policy, or reads the keys of one that is."""
        return isinstance(self.held[self.owner(layer_idx)], PolicyLayer)

    def owner(self, layer_idx: int) -> int:
        """The layer whose keys a layer reads, which is itself unless it has none."""
        layer = self.held[layer_idx]
        return layer.reads if isinstance(layer, ReadingLayer) else layer_idx

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that a layer has seen, with its earlier tiles."""
        return super().get_seq_length(layer_idx) + (0 if self.tile is None else self.tile.start)

    def begin_states(self) -> None:
        """Let every state be that of the held layers again: a forward must not change what the next one sees."""
        for index, layer in enumerate(self.held):
            if isinstance(layer, States):
                self.layers[index] = self._view(layer)

    def _view(self, layer: Any) -> Any:
        """The layer that a forward is given in place of one that is held."""
        if isinstance(layer, SlotsAndState):
            view = _PassingState(layer)
        elif isinstance(layer, PolicyLayer):
            return _PassingLatents(layer) if isinstance(layer, TakesLatents) else _Passing(layer)
        elif isinstance(layer, WindowAndState):
            view = _SlidingState(layer, self)
        elif isinstance(layer, StateLayer):
            view = StateLayer(layer.number_of_states)
        else:
            return layer if isinstance(layer, DummyLayer | ReadingLayer) else _Sliding(layer, self)
        view.adopt_states(layer, self._rows)
        return view

    @abstractmethod
    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        transform: ScoreTransform,
        forward: Forward | None = None,
    ) -> Tensor:
        """Attend from new tokens of a layer under the policy; see `PolicyCache.attend`. Nothing is stored."""
        ...


class _Passing(CacheLayerMixin):
    """A layer under the policy: keys pass through, and `PassingCache.attend` reads what is held."""

    is_sliding = False

    def __init__(self, layer: PolicyLayer) -> None:
        super().__init__()
        self._columns = layer.get_seq_length()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values as they are."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Columns seen, padding included."""
        return self._columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of a mask over everything seen and the new tokens."""
        return self._columns + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1


class _PassingLatents(TakesLatents, _Passing):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A layer under the policy with latent attention."""


class _Sliding(CacheLayerMixin):
    """An unmanaged layer with a window of the newest tokens: read as in a step, and left unchanged.

    In a forward in tiles, each tile also sees the tiles before it, which a temporary window of this forward holds.
    """

    is_sliding = True

    def __init__(self, layer: Any, cache: PassingCache) -> None:
        super().__init__()
        self._layer = layer
        self._cache = cache
        self._running: DynamicSlidingWindowLayer | None = None
        self.sliding_window = layer.sliding_window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The window's keys and values and the new ones; one row that is held serves any number of new ones."""
        rows = key_states.shape[0]
        tile = self._cache.tile
        if tile is not None:
            running = self._window(rows) if self._running is None or tile.start == 0 else self._running
            self._running = None if tile.is_last else running
            return running.update(key_states, value_states)
        held = (t.expand(rows, -1, -1, -1) for t in (self._layer.keys, self._layer.values))
        keys, values = (torch.cat(pair, -2) for pair in zip(held, (key_states, value_states), strict=True))
        return keys, values

    def _window(self, rows: int) -> DynamicSlidingWindowLayer:
        """A copy of the layer that other tokens may be added to, for a number of rows."""
        copy = DynamicSlidingWindowLayer(self.sliding_window)
        newest = slice(1 - self.sliding_window, None)
        held = [t[:, :, newest].expand(rows, -1, -1, -1) for t in (self._layer.keys, self._layer.values)]
        copy.lazy_initialization(*held)
        copy.keys, copy.values = held
        copy.cumulative_length = self._layer.cumulative_length
        return copy

    def get_seq_length(self) -> int:
        """Columns seen, padding included."""
        return self._layer.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of a mask over the window and the new tokens."""
        tile = self._cache.tile
        window = self._layer if tile is None or tile.start == 0 or self._running is None else self._running
        return window.get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        """The window."""
        return self._layer.get_max_length()


class _WithState(States):
    """A view of a layer with a state, of which it has a copy that a forward may change."""

    is_compileable = False  # pyright: ignore

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Make a state; keys and values are held by the layer that is shown."""
        if not args:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)


class _PassingState(_Passing, _WithState):
    """A layer under the policy with a state beside its slots."""

    def __init__(self, layer: SlotsAndState) -> None:
        LinearAttentionLayer.__init__(self, layer.number_of_states)
        _Passing.__init__(self, layer)

    lazy_initialization = _WithState.lazy_initialization  # pyright: ignore


class _SlidingState(_Sliding, _WithState):
    """An unmanaged layer with a window and a state."""

    def __init__(self, layer: WindowAndState, cache: PassingCache) -> None:
        LinearAttentionLayer.__init__(self, layer.number_of_states)
        _Sliding.__init__(self, layer, cache)

    lazy_initialization = _WithState.lazy_initialization  # pyright: ignore
