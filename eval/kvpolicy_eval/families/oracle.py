"""The oracle: a stock model with its stock cache, in which keys can be hidden from each layer and KV head.

Its own eager attention computes everything; the oracle only adds to its mask what a policy would have evicted.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpolicy.hf.attention_interface import configs_of
from kvpolicy.hf.discovery import home

Held = dict[int, Tensor]
"""Which of the first tokens may be read, by layer: [B, H, tokens] bool; all later ones may."""

_NAME = "kvpolicy_oracle"
_readable: Held = {}


@contextmanager
def oracle(model: nn.Module) -> Generator[Callable[[Mapping[int, Tensor]], None]]:
    """Let a stock model attend to some tokens alone.

    Args:
        model: A stock model.

    Yields:
        A function that says what the next forwards may read.
    """
    owners = owners_of(model)
    configs = configs_of(model)
    before = [config._attn_implementation_internal for config in configs]
    hooks = [module.register_forward_pre_hook(_hide_outside, with_kwargs=True) for module in _outside(model)]

    def read(held: Mapping[int, Tensor]) -> None:
        _readable.clear()
        _readable.update(held)
        _readable.update({reader: held[owner] for reader, owner in owners.items() if owner in held})

    for config in configs:
        config._attn_implementation_internal = _NAME
    try:
        read({})
        yield read
    finally:
        read({})
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name
        for hook in hooks:
            hook.remove()


def owners_of(model: nn.Module) -> dict[int, int]:
    """Layers that read the keys of an earlier one, and that one: the last of their kind with keys of its own."""
    owners = dict[int, int]()
    last = dict[Any, int]()
    for module in _attentions(model):
        index = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
        kind = getattr(module, "layer_type", None)
        if not getattr(module, "is_kv_shared_layer", False):
            last[kind] = index
        else:
            named = getattr(module, "kv_shared_layer_index", None)
            owners[index] = last[kind] if named is None else int(named)  # pyright: ignore[reportArgumentType]
    return owners


def _attentions(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if type(module).__name__.endswith("Attention") and isinstance(getattr(module, "layer_idx", None), int):
            yield module


def _outside(model: nn.Module) -> list[nn.Module]:
    """Attention modules that do not use the attention interface, such as those of Falcon."""
    return [module for module in _attentions(model) if not hasattr(_source(module), "ALL_ATTENTION_FUNCTIONS")]


def _source(module: nn.Module) -> Any:
    """The Python module in which the forward of a module is defined."""
    return sys.modules[home(module).__module__]


def _hide_outside(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add to the mask that a module outside the interface is called with."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    hidden = _hidden(module, int(module.config.num_attention_heads), torch.float32)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    if hidden is not None:
        mask = bound.arguments["attention_mask"]
        bound.arguments["attention_mask"] = _add(mask, _wide(hidden, mask.shape[-1]))
    return bound.args, bound.kwargs


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """The eager attention of a module, with a mask that hides more."""
    mask: Any = attention_mask
    hidden = _hidden(module, query.shape[1], query.dtype)
    eager = getattr(_source(module), "eager_attention_forward", None)
    if mask is None and (hidden is not None or eager is None):
        mask = _causal(query.shape[2], key.shape[2], query.dtype)
    if hidden is not None:
        assert mask is not None  # made above where the model gave none
        mask = _add(mask, _wide(hidden, key.shape[2]))
    if kwargs.get("scaling", 0.0) is None:  # the eager functions of some families divide by it
        del kwargs["scaling"]
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"] if eager is None else eager
    return attend(module, query, key, value, mask, **kwargs)


def _hidden(module: nn.Module, heads: int, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores of the first tokens, [B, heads, 1, tokens]; None if all may be read."""
    readable = _readable.get(getattr(module, "layer_idx", -1))  # pyright: ignore[reportArgumentType]
    if readable is None:
        return None
    whole = readable.repeat_interleave(heads // readable.shape[1], 1)[:, :, None]
    return torch.zeros(whole.shape, dtype=dtype).masked_fill(~whole, torch.finfo(dtype).min)


def _wide(hidden: Tensor, columns: int) -> Tensor:
    """The same for all columns: later tokens may be read."""
    return nn.functional.pad(hidden, (0, columns - hidden.shape[-1]))


def _causal(queries: int, columns: int, dtype: torch.dtype) -> Tensor:
    allowed = torch.ones(queries, columns, dtype=torch.bool).tril(columns - queries)
    return torch.zeros(1, 1, queries, columns, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


def _add(mask: Any, hidden: Tensor) -> Tensor:
    lowest = torch.finfo(hidden.dtype).min
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=hidden.dtype).masked_fill(~mask, lowest)
    return torch.clamp(mask + hidden, min=lowest)


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
