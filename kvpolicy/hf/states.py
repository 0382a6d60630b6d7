"""Layers of a cache with a state: linear attention, a state space model, or a short convolution.

A state has a fixed size and no tokens, so that no policy manages it. It stays the model's own, as transformers keeps
it; what is added here is what a cache under a policy does with every layer: select rows, undo steps, go into files, and
be counted. Its bytes follow from the config alone: transformers' own modules run on the device `meta`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvpolicy.hf.cache_names import NAMES
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.meta_model import meta_model
from kvpolicy.text.errors import KVPolicyError

_KINDS = {"conv": "conv_states", "recurrent": "recurrent_states"}
"""The attribute of transformers for each kind of state, by its name in files."""

_FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size")
"""Attributes in which transformers keeps facts of each state, by its number."""


class States(LinearAttentionLayer):
    """States of a layer, each [B, ...], and what a cache under a policy does with them."""

    def named_states(self) -> dict[str, Tensor]:
        """The states by their names in files, such as `conv.0` and `recurrent.0`."""
        found = ((kind, getattr(self, name)) for kind, name in _KINDS.items())
        return {f"{kind}.{n}": t for kind, states in found for n, t in states.items() if t is not None}

    def state_nbytes(self) -> int:
        """Bytes of the states."""
        return sum(t.untyped_storage().nbytes() for t in self.named_states().values())

    def map_states(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every state by `fn` of it, which selects or repeats rows."""
        for name in self.named_states():
            kind, number = _place(name)
            getattr(self, _KINDS[kind])[number] = fn(self.named_states()[name])

    def copy_states(self) -> list[Tensor]:
        """Copies of the states, to be given to `restore_states`."""
        return [state.clone() for state in self.named_states().values()]

    def restore_states(self, copies: Sequence[Tensor]) -> None:
        """Write the result of `copy_states` back in place, so that a compiled step finds the same tensors."""
        for state, copied in zip(self.named_states().values(), copies, strict=True):
            state.copy_(copied)

    def load_states(self, held: Mapping[str, Tensor], device: torch.device) -> None:
        """Fill an empty layer with the result of `named_states`, on a device."""
        for name, state in held.items():
            kind, number = _place(name)
            # By the function of transformers, which notes the size of the kernel, the dtype and the device.
            self.lazy_initialization(**{_KINDS[kind]: state.to(device)}, state_idx=number)  # pyright: ignore[reportArgumentType]
            getattr(self, _KINDS[kind])[number].copy_(state)
            self.has_previous_state[number] = True

    def adopt_states(self, other: States, rows: int | None = None) -> None:
        """Take over copies of another layer's states; those of its one row for each of `rows`, if that is given."""
        for name in _FLAGS:
            setattr(self, name, dict(getattr(other, name)))
        for name in _KINDS.values():
            setattr(self, name, {n: _copy(state, rows) for n, state in getattr(other, name).items()})
        self.dtype = other.dtype
        self.device = other.device

    def begin_states(self, like: States, rows: int) -> None:
        """Begin with empty states of so many rows, like those of another layer."""
        self.adopt_states(like, rows)
        for state in self.named_states().values():
            state.zero_()

    def put_states(self, row: int, other: States) -> None:
        """Copy the states of another layer, of one row, to a row, in place."""
        for state, own in zip(self.named_states().values(), other.named_states().values(), strict=True):
            state[row] = own[0]

    def drop_states(self, row: int) -> None:
        """Empty the states of a row, in place."""
        for state in self.named_states().values():
            state[row] = 0

    def forget_states(self) -> None:
        """Forget the states: zeroed ones, as transformers leaves them, would keep their number of rows."""
        LinearAttentionCacheLayerMixin.__init__(self, self.number_of_states)


def copied_states(layers: Sequence[Any]) -> dict[int, list[Tensor]]:
    """Copies of the states of those layers that have some, by their index."""
    return {index: layer.copy_states() for index, layer in enumerate(layers) if isinstance(layer, States)}


class IdleRows(NamedTuple):
    """Rows without a token in the forward that runs, and the states that they keep.

    The modules of transformers ignore the mask in a forward of one token per row, and take padding for zeros in others:
    both move the state of a row.

    Attributes:
        rows: Which rows have no token, [B] bool.
        states: Copies of the states of each layer before the forward, by its index.
    """

    rows: Tensor
    states: dict[int, list[Tensor]]

    @classmethod
    def of(cls, layers: Sequence[Any], valid: Tensor | None) -> IdleRows | None:
        """Those of a forward that begins; None if every row has a token.

        Args:
            layers: All layers of the cache.
            valid: Which of the new tokens are not padding, [B, P] bool; None if all are.
        """
        if valid is None or bool(valid.any(-1).all()):
            return None
        return cls(~valid.any(-1), copied_states(layers))

    def restore(self, layers: Sequence[Any]) -> None:
        """Give these rows back their states after the forward, in place; those that had none begin with zeros."""
        for index, copies in self.states.items():
            states = layers[index].named_states().values()
            for state, copied in zip(states, copies or map(torch.zeros_like, states), strict=True):
                rows = self.rows.to(state.device).view(-1, *[1] * (state.dim() - 1))
                state.copy_(torch.where(rows, copied, state))


def _place(name: str) -> tuple[str, int]:
    """The kind and the number of a state, from its name in files."""
    kind, _, number = name.partition(".")
    return kind, int(number)


def _copy(state: Tensor | None, rows: int | None) -> Tensor | None:
    if state is None or rows is None:
        return None if state is None else state.clone()
    return state.expand(rows, *state.shape[1:]).clone()


def stock_nbytes(layer: Any) -> int:
    """Bytes of a layer that are the model's own: of its sliding window, and of its states."""
    states = layer.state_nbytes() if isinstance(layer, States) else 0
    if not isinstance(layer, DynamicSlidingWindowLayer) or not layer.is_initialized:
        return states
    window = [layer.keys, layer.values]
    return states + sum(t.untyped_storage().nbytes() for t in window if t is not None)


def is_state(name: str) -> bool:
    """Whether a tensor of a layer in a file is a state."""
    kind, _, number = name.partition(".")
    return kind in _KINDS and number.isascii() and number.isdigit()


class StateLayer(States):
    """A layer with a state and no attention."""

    is_sliding = False
    is_compileable = False  # pyright: ignore  # of several layers, some of which are not
    keys: Tensor | None = None
    values: Tensor | None = None

    @property
    def is_initialized(self) -> bool:
        """Whether the layer has seen a token."""
        return any(self.has_previous_state.values())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take rows `indices` [B']."""
        self.map_states(lambda t: t[indices.to(t.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.map_states(lambda t: t.repeat_interleave(repeats, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take rows `beam_idx` [B']."""
        self.batch_select_indices(beam_idx)

    def reset(self) -> None:
        """Forget everything."""
        self.forget_states()


class WindowAndState(States, LinearAttentionAndSlidingWindowAttentionLayer):
    """A layer with a sliding window and a state beside it, such as Zaya's."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take rows `indices` [B']."""
        DynamicSlidingWindowLayer.batch_select_indices(self, indices)
        self.map_states(lambda t: t[indices.to(t.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        DynamicSlidingWindowLayer.batch_repeat_interleave(self, repeats)
        self.map_states(lambda t: t.repeat_interleave(repeats, 0))

    def reset(self) -> None:
        """Forget everything."""
        LinearAttentionAndSlidingWindowAttentionLayer.__init__(self, self.sliding_window, self.number_of_states)


class SlotsAndState(PolicyLayer, States, LinearAttentionAndFullAttentionLayer):  # pyright: ignore
    """The slots of a layer under a policy that has a state beside its attention, such as Falcon-H1's."""

    def __init__(self, *args: Any, number_of_states: int, **kwargs: Any) -> None:
        """Make an empty layer; see `PolicyLayer`."""
        self.number_of_states = number_of_states
        self.forget_states()
        PolicyLayer.__init__(self, *args, **kwargs)

    @property
    def is_croppable(self) -> bool:
        """Never: a state holds no earlier one."""
        return False

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """As transformers calls it: with keys and values, or with a state by its name."""
        (PolicyLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor with rows by `fn` of it, which selects or repeats rows."""
        PolicyLayer.map_rows(self, fn)
        self.map_states(fn)

    def reset(self) -> None:
        """Forget everything but a shared prefix."""
        self.forget_states()
        PolicyLayer.reset(self)


_TOKENS = 3
"""Tokens of the call that fills the states; their size does not depend on it."""

_MOST = 16
"""Configs that are remembered."""

_known: dict[str, dict[int, int]] = {}
"""Sizes by dtype and content of the config: a model with many layers takes seconds."""

_ARGUMENTS = (*NAMES, "cache_params")
"""Names of the cache among the arguments of modules with a state."""


def state_nbytes(config: Any, dtype: torch.dtype) -> dict[int, int]:
    """Bytes of the states of one row in each layer that has some.

    Args:
        config: The config of a text decoder.
        dtype: The dtype of the model; a state may have another one.

    Raises:
        KVPolicyError: If the modules put no states there, or cannot be run on `meta`.
    """
    key = f"{dtype} {config.to_json_string(use_diff=False)}"
    if key not in _known:
        if len(_known) >= _MOST:
            _known.pop(next(iter(_known)))
        _known[key] = _measured(copy.deepcopy(config), dtype)
    return dict(_known[key])


def _measured(config: Any, dtype: torch.dtype) -> dict[int, int]:
    with torch.device("meta"), torch.no_grad():
        model = meta_model(AutoModel, config, dtype=dtype).eval()
        cache = DynamicCache(config=config)
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                _fill(model, cache, index, config.hidden_size, dtype)
    return {index: _nbytes(layer) for index, layer in enumerate(cache.layers) if _nbytes(layer)}


def _fill(model: nn.Module, cache: Cache, index: int, hidden: int, dtype: torch.dtype) -> None:
    """Run the modules of a layer that take a cache until one of them has filled its states."""
    x = torch.zeros(1, _TOKENS, hidden, dtype=dtype, device="meta")
    failed: Exception | None = None
    for module in model.modules():
        if getattr(module, "layer_idx", None) != index:
            continue
        parameters = inspect.signature(module.forward).parameters
        name = next((name for name in _ARGUMENTS if name in parameters), None)
        if name is None:
            continue
        try:
            module(x, **{name: cache})
        except Exception as error:  # attention, which needs more arguments
            failed = error
        if _nbytes(cache.layers[index]):
            return
    if failed is None:  # experts, which transformers counted among the layers with a state before 5.24
        return
    raise KVPolicyError(
        f"The state of each layer must be in the layers of transformers' cache, got layer {index} of "
        f"{type(model).__name__}, which keeps its own in another way; try another model."
    ) from failed


def _nbytes(layer: Any) -> int:
    states = (getattr(layer, name, {}).values() for name in ("conv_states", "recurrent_states"))
    return sum(state.nbytes for each in states for state in each if state is not None)
