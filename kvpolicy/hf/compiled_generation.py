"""Compiled decode steps in `generate`: a step of one token is one graph, and what waits for the host is done after it.

transformers compiles the steps of `generate` on a cache that says that its step is one graph: on an accelerator by
default, and elsewhere where the user asks. A prompt is not compiled, since its budgets depend on the data, and neither
is any other forward that is no plain step. Sizes that change from one cache to the next are dynamic, so that a second
request, and a cache that grows, need no second compilation. Rows that come and go stay in one cache, whose sizes are
those of all requests: they are constants of the graph, which is traced several times as fast.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as _dynamo
from torch._dynamo.exc import TorchDynamoException
from torch.fx.experimental import _config
from transformers.generation.configuration_utils import CompileConfig

from kvpolicy.hf.attachment import HOLD, Attachment
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.cache_names import CACHE, passed_cache
from kvpolicy.reporting.logging import warn_uncompiled

shapes: Any = _config
"""How PyTorch names sizes."""
traces: Any = _dynamo
"""How PyTorch traces functions."""


def step_obstacle(cache: PolicyCache) -> str:
    """Why a step on a cache is not one graph; empty if it is."""
    windows = cache.attachment.model_shape.unmanaged
    if windows:
        return f"layers with sliding windows, such as layer {min(windows)}, keep a stock cache that grows in each step"
    return ""


def model_obstacle(model: Any) -> str:
    """Why transformers does not compile a model on any cache; empty if it does."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        return f"{type(quantizer).__name__} cannot be compiled"
    devices = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
    if "disk" in devices or ("cpu" in devices and len(devices) > 1):
        return "a part of the weights is offloaded"
    return ""


def ask_to_compile(model: Any, cache: PolicyCache, generation_config: Any) -> None:
    """Ask transformers to compile the steps of a generation on any device, if `attach` was told to.

    Args:
        model: The model that generates.
        cache: Its cache.
        generation_config: The config of this generation, which is changed.
    """
    attachment = cache.attachment
    cache.compiles = False  # until transformers asks
    # Nor those of an assistant, which transformers does not compile either: it is small, and drafts vary in length.
    if not attachment.compile or generation_config.disable_compile or getattr(generation_config, "is_assistant", False):
        return
    reason = step_obstacle(cache) or model_obstacle(model)
    if reason:
        _warn(attachment, cache, reason)
        return
    config = generation_config.compile_config or _default(model)
    everywhere: Any = CompileConfig(**config.to_dict())
    everywhere._compile_all_devices = True
    generation_config.compile_config = everywhere


def is_plain_step(cache: PolicyCache, inputs: dict[str, Any]) -> bool:
    """Whether a forward is one token for each row, and changes nothing on the host that eager code must see."""
    tokens: Tensor | None = inputs.get("input_ids")
    tokens = inputs.get("inputs_embeds") if tokens is None else tokens
    if tokens is None or tokens.shape[1] != 1 or not cache.has_prompt or not cache.attachment.active:
        return False
    journal = cache.journal
    waits = cache.holds_next or (cache.announced.awaits_chunk and cache.attachment.chunks == HOLD)
    return not (waits or journal.is_shared or journal.mark is not None)


def keep_mask(cache: PolicyCache, given: Any, inputs: dict[str, Any]) -> None:
    """Let a forward that is not compiled have the mask of `generate` itself, by which earlier columns are checked.

    For a cache that is compileable, transformers makes the masks of the layers before it runs the model.

    Args:
        cache: The cache.
        given: The mask that `generate` holds, or None.
        inputs: The arguments of the forward, which are changed.
    """
    if given is not None and not is_plain_step(cache, inputs):
        inputs["attention_mask"] = given


_compiled: weakref.WeakKeyDictionary[Any, dict[str, Callable[..., Any]]] = weakref.WeakKeyDictionary()
"""The compiled call of each model by its options: programs that attach for each request compile once."""


def _call(model: Any, inputs: dict[str, Any]) -> Any:
    """Call a model, which is an argument, so that no compiled function keeps it alive."""
    return model(**inputs)


class StepCompiler:
    """The compiled steps of a model while a policy is attached to it.

    Attributes:
        model: The module that implements `generate`.
    """

    def __init__(self, model: Any) -> None:
        """Nothing is compiled yet."""
        self.model = model
        self._criteria: Callable[..., bool] = model._valid_auto_compile_criteria

    def criteria(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        """Whether `generate` compiles its steps, as transformers decides; the cache is told."""
        compiles = self._criteria(model_kwargs, generation_config)
        cache = model_kwargs.get(CACHE)
        if isinstance(cache, PolicyCache):
            cache.compiles = compiles
        return compiles

    def compiled_call(self, compile_config: CompileConfig | None, *, is_dynamic: bool = True) -> Callable[..., Any]:
        """The call of the model for `generate`: compiled in a plain step, and else the model's own.

        Args:
            compile_config: How it is compiled; None for the default of transformers.
            is_dynamic: Whether sizes are dynamic from the first step on, and not only once they have changed, where the
                config does not say.
        """
        config = compile_config or _default(self.model)
        asked = config.to_dict()
        if config.dynamic is None and is_dynamic:
            asked["dynamic"] = True
        # Whole, so that a step that cannot be compiled says so before it has changed anything. Isolated, since the
        # graphs of other models would count towards the same limit.
        asked |= {"fullgraph": True, "isolate_recompiles": True}
        known = _compiled.setdefault(self.model, {})
        key = repr(asked)
        if key not in known:
            known[key] = torch.compile(_call, **asked)
        return Steps(self.model, known[key])


@contextmanager
def _first_step() -> Generator[None]:
    """How PyTorch traces the first step: each dynamic size has a symbol of its own, and numbers are constants.

    Or rows that happen to be as many as slots would be fixed to that number; and numbers that are symbols, such as the
    scale of attention, make PyTorch trace the whole step a second time.
    """
    with shapes.patch(use_duck_shape=False), traces.patch(specialize_float=True):
        yield


class Steps:
    """The forwards of one generation: compiled where they are plain steps, and else the model's own.

    Attributes:
        model: The model.
        compiled: Its compiled call.
    """

    def __init__(self, model: Any, compiled: Callable[..., Any]) -> None:
        """No step was run."""
        self.model = model
        self.compiled = compiled
        self._has_begun = False

    def __call__(self, **inputs: Any) -> Any:
        """Run a forward; behind a compiled step, what waits for the host is done."""
        cache = passed_cache(inputs)
        if not isinstance(cache, PolicyCache) or not cache.compiles or not is_plain_step(cache, inputs):
            return self.model(**inputs)
        cache.make_room()
        before = cache.forward
        # It takes time, so only where a compilation is due.
        tracing = nullcontext() if self._has_begun else _first_step()
        self._has_begun = True
        try:
            with tracing:
                out = self.compiled(self.model, inputs)
        except TorchDynamoException as error:
            # Raised before the graph ran.
            cache.compiles = False
            _warn(cache.attachment, cache, _first_sentence(error))
            return self.model(**inputs)
        if cache.forward is before:  # else PyTorch ran it uncompiled, with the hooks that count the step
            cache.tick()
        return out


def step_call(model: Any, cache: PolicyCache) -> Callable[..., Any]:
    """The call of a model for steps on a cache, outside of `generate`: compiled if `generate` would compile them.

    Args:
        model: The module that implements `generate`, with a policy attached.
        cache: The cache that each call gets. If `attach` was told to compile and cannot, a warning says why.
    """
    config = copy.deepcopy(model.generation_config)
    ask_to_compile(model, cache, config)
    if model._valid_auto_compile_criteria({CACHE: cache}, config):
        return model.get_compiled_call(config.compile_config, is_dynamic=cache.rows is None)
    return model


def _default(model: Any) -> CompileConfig:
    """The config of transformers for a model, which depends on its device."""
    make = getattr(model, "_default_compile_config", CompileConfig)
    return make()


def _first_sentence(error: Exception) -> str:
    """The beginning of a message of several lines; after a colon, with the line behind it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return said.rstrip(".")


def _warn(attachment: Attachment, cache: PolicyCache, reason: str) -> None:
    if attachment.first_warning("compile"):
        warn_uncompiled(cache.policy, reason)
