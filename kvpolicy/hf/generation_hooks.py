"""Changes to `generate` on a model with a policy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache

from kvpolicy.hf.attachment import attachment_of
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.cache_names import CACHE, OLD, rename_cache
from kvpolicy.hf.forward_calls import (
    check_asked,
    check_conversation,
    check_ends,
    check_stock,
    prompt_columns,
    row_lengths,
)
from kvpolicy.spec.errors import KVPolicyError

_CONTINUOUS = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")
"""Methods of transformers that generate with a paged cache of their own."""


def generating_module(model: nn.Module) -> nn.Module:
    """The module that implements `generate`: the model, or the one inside a wrapper such as a PEFT model."""
    return next((module for module in model.modules() if isinstance(module, GenerationMixin)), model)


def offer_cache(model: nn.Module, note: Callable[[PolicyCache], None]) -> list[Callable[[], None]]:
    """Let `generate` begin with a cache under the policy that knows how many tokens will come.

    Args:
        model: The model that the policy is attached to.
        note: Called with every cache that is made.

    Returns:
        How to undo it.
    """
    inner: Any = generating_module(model)
    undo: list[Callable[[], None]] = []
    if not hasattr(inner, "_prepare_cache_for_generation"):
        return undo
    prepare = inner._prepare_cache_for_generation

    def prepare_cache(
        generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch: int, length: int, *rest: Any
    ) -> Any:
        given = model_kwargs.get(CACHE)
        columns = prompt_columns(model_kwargs, generation_config)
        # transformers passes `max_length - 1`, since the last generated token is never an input.
        new = max(length + 1 - columns, 0) if columns else None
        policy = given.policy if isinstance(given, PolicyCache) else attachment_of(model).policy
        check_asked(policy, generation_config, mode)
        if not getattr(generation_config, "is_assistant", False):  # whose mask hides drafts that are padding tokens
            check_ends(model_kwargs)
        if isinstance(given, PolicyCache):
            check_conversation(given.get_seq_length(), columns)
            given.expect(row_lengths(model_kwargs, columns), new or 0)
        # First, transformers checks its arguments and decides whether there is a cache at all.
        result = prepare(generation_config, model_kwargs, mode, batch, length, *rest)
        if given is None and isinstance(model_kwargs.get(CACHE), Cache):
            check_stock(model_kwargs[CACHE])
            prompt = row_lengths(model_kwargs, columns)
            cache = model_kwargs[CACHE] = PolicyCache(model, prompt=prompt, new=new)
            if getattr(generation_config, "is_assistant", False):  # as transformers does with its own cache
                cache.activate_past_recording()
            note(cache)
        return result

    _set(inner, "_prepare_cache_for_generation", prepare_cache, undo)
    if CACHE == OLD:
        _set(inner, "generate", _with_old_name(inner.generate), undo)
    for name in _CONTINUOUS:
        if hasattr(inner, name):
            _set(inner, name, _refuse_continuous_batching, undo)
    return undo


def _with_old_name(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Let `generate` take `cache=` too, in a version of transformers that refuses it as unused."""

    @functools.wraps(generate)
    def with_either(*args: Any, **kwargs: Any) -> Any:
        rename_cache(kwargs, OLD)
        return generate(*args, **kwargs)

    return with_either


def _set(module: Any, name: str, value: Any, undo: list[Callable[[], None]]) -> None:
    """Shadow a method of a module by an attribute of the instance."""
    setattr(module, name, value)
    undo.append(lambda: module.__dict__.pop(name, None))


def _refuse_continuous_batching(*args: Any, **kwargs: Any) -> Any:
    raise KVPolicyError(
        "Continuous batching (generate_batch) must run without a policy, since it has a paged cache of its own, got a "
        "model with one; try generate with a padded batch, or detach the policy."
    )
