"""The bytes of a model's states, from its config alone: transformers' own modules run on the device `meta`."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn
from transformers import AutoModel
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin

from kvpolicy.hf.cache_names import NAMES
from kvpolicy.text.errors import KVPolicyError

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
        model = AutoModel.from_config(config, dtype=dtype).eval()
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
