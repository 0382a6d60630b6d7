"""The forwards of the model: a prompt, and a step of all rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.cache_names import CACHE, cache_argument, passed_cache
from kvpolicy.hf.compiled_generation import ask_to_compile
from kvpolicy.hf.discovery import find_sites
from kvpolicy.hf.rotary_lookup import changing_kind
from kvpolicy.serving.interruptible import Interruptible
from kvpolicy.serving.metrics import CacheUsage, Metrics
from kvpolicy.serving.prefix import Prefix


class OneRow:
    """The model with one row, which is the cache of the answer in flight, of exactly the size that it needs.

    Args:
        model: The model, with a policy attached.
        handle: The handle of the policy.
        metrics: The counters.
        prefix: The cache that every request starts from, or None.
    """

    count = 1

    def __init__(self, model: Any, handle: Any, metrics: Metrics, prefix: Prefix | None = None) -> None:
        """The row is free."""
        self._model = model
        self._handle = handle
        self._metrics = metrics
        self._prefix = prefix
        self._call: Callable[..., Any] = model
        self._cache: PolicyCache | None = None

    def read(self, answer: Any) -> tuple[PolicyCache, Tensor]:
        """Run the text of an answer: its cache, and logits [V] of the next token.

        `generate` prepares the cache and the logits processors, and refuses what it cannot do. The processors are left
        in `answer.prompt`.
        """
        processors: list[Any] = []

        def run(model: Any, input_ids: Tensor, logits_processor: Any, generation_config: Any, **kwargs: Any) -> Any:
            cache = passed_cache(kwargs)
            processors.extend(logits_processor)
            return cache, self._forward(model, cache, input_ids[:, cache.get_seq_length() :])[0]

        text = torch.tensor([answer.text], device=self._model.device)
        prefix = self._prefix
        given: dict[str, Any] = {}
        if prefix is not None and not changing_kind(self._model.config, len(prefix.ids), len(answer.text)):
            given[CACHE] = prefix.start()
        config = copy.deepcopy(answer.prompt.config)
        config.max_new_tokens -= len(answer.tokens)
        if not answer.tokens:
            self._metrics.prompt_tokens += len(answer.text)
        try:
            with torch.inference_mode():
                found = self._model.generate(
                    text,
                    attention_mask=torch.ones_like(text),
                    generation_config=config,
                    custom_generate=run,
                    **given,
                )
        finally:
            self._handle.cache = None  # holds the newest one
        if answer.prompt.processors is None:
            answer.prompt.processors = processors
        return found

    def copy(self, cache: PolicyCache) -> PolicyCache:
        """A copy of a cache that `read` has made."""
        return cache.fork()

    def put(self, row: int, cache: PolicyCache) -> None:
        """Let the row go on from a cache."""
        self._cache = cache
        self._call = step_call(self._model, cache)
        self._metrics.hold(cache)

    def drop(self, row: int) -> None:
        """Free the row."""
        self._cache = self._handle.cache = None
        self._call = self._model

    def step(self, tokens: list[int]) -> Tensor:
        """Run a token: logits [1, V] of the next one."""
        with torch.inference_mode():
            return self._forward(self._call, self._cache, torch.tensor([tokens], device=self._model.device))

    def usage(self, row: int) -> CacheUsage:
        """What the cache holds."""
        return CacheUsage.of(self._cache)

    def must_read_again(self, length: int) -> bool:
        """Whether a text must be read as a whole for its token number `length`, as models with `longrope` do."""
        return bool(changing_kind(self._model.config, length - 1, length))

    def restart(self) -> None:
        """Free the row, after a step that was broken off."""
        self.drop(0)

    def _forward(self, call: Callable[..., Any], cache: Any, tokens: Tensor) -> Tensor:
        """Logits [B, V] of the token behind `tokens` [B, P]."""
        out = call(input_ids=tokens, **cache_argument(self._model, cache), **self._kept)
        return out.logits[:, -1]

    @property
    def _kept(self) -> dict[str, Any]:
        """The argument by which a model computes the logits of the last token alone, if it has one."""
        return {"logits_to_keep": 1} if self._model._supports_logits_to_keep() else {}


def step_call(model: Any, cache: Any) -> Callable[..., Any]:
    """The call of a model for steps on a cache: compiled if `generate` would compile them."""
    config = copy.deepcopy(model.generation_config)
    ask_to_compile(model, cache, config)
    if model._valid_auto_compile_criteria({CACHE: cache}, config):
        return model.get_compiled_call(config.compile_config)
    return model


def pause_between_tiles(model: Any, reading: Interruptible) -> Callable[[], None]:
    """Let the forward of a prompt pause before each layer, and before each tile of a prompt that is taken in tiles.

    Args:
        model: The model.
        reading: What runs the prompt.

    Returns:
        How to undo it.
    """

    def pause(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            reading.pause()

    hooks = [site.attention.register_forward_pre_hook(pause) for site in find_sites(model).layers]

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


def settle(model: Any) -> Callable[[], None]:
    """What waits until the device of a model has done its work."""
    if model.device.type == "cpu":
        return lambda: None
    return torch.accelerator.synchronize
