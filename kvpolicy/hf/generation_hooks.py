"""Changes to `generate` on a model with a policy: which cache it begins with, goes on with and ends with.

The angles of a rotary embedding may change at some length (`longrope`), so that keys of before are of no use behind it.
transformers then drops the cache in the middle of a generation, and runs the whole text without one; here, the cache
begins again with that text.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache, EncoderDecoderCache

from kvpolicy.hf import forward_calls
from kvpolicy.hf.announced import Announced
from kvpolicy.hf.attachment import attachment_of
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.cache_names import CACHE, OLD, cache_argument, output_cache, passed_cache, rename_cache
from kvpolicy.hf.compiled_generation import StepCompiler, ask_to_compile, keep_mask
from kvpolicy.hf.rope_deltas import RopeDeltas
from kvpolicy.text.errors import KVPolicyError, KVPolicyStateError


class Answer:
    """The answer of a running call of `generate`.

    Attributes:
        cache: The cache of its answer; None until it begins.
        end: Columns of the answer at most, the prompt included; None if unknown.
    """

    def __init__(self) -> None:
        """Nothing has begun."""
        self.cache: PolicyCache | None = None
        self.end: int | None = None


class _Generating(threading.local):
    """The generation of a thread: several threads may run a model, each with a generation of its own.

    Attributes:
        answer: The outermost generation, or None.
        depth: How many generations run, one within another.
    """

    answer: Answer | None = None
    depth = 0


class RecentCache:
    """The most recent cache that a model ran with: that of an answer of `generate`, or else that of a forward.

    A generation may run the model on other caches: for a negative prompt, for drafts, in a generation inside it. Those
    are not its answer's.

    Attributes:
        cache: The cache; None before the first one.
    """

    def __init__(self) -> None:
        """Nothing ran yet."""
        self.cache: PolicyCache | None = None
        self._generating = _Generating()

    @contextmanager
    def generating(self) -> Generator[Answer | None]:
        """The time of one generation; yields what is known of it, or None if it runs within another one."""
        running = self._generating
        answer = None if running.depth else Answer()
        running.answer = answer or running.answer
        running.depth += 1
        try:
            yield answer
        finally:
            running.depth -= 1
            running.answer = running.answer if running.depth else None

    def expect(self, cache: PolicyCache, end: int | None) -> None:
        """Note the cache that a generation is about to begin with, and at how many columns it ends."""
        answer = self._generating.answer
        # Others may run before the outermost one begins with a cache, such as that of `token_healing`.
        if answer is not None and (answer.cache is None or self._generating.depth == 1):
            answer.cache = cache
            answer.end = end

    def end_of(self, cache: PolicyCache) -> int | None:
        """Columns at which the generation on a cache ends; None if unknown."""
        answer = self._generating.answer
        return answer.end if answer is not None and answer.cache is cache else None

    def note(self, cache: PolicyCache) -> bool:
        """Note the cache of a forward that has begun; returns whether it is that of the answer of a generation."""
        answer = self._generating.answer
        if answer is not None and answer.cache is None:
            answer.cache = cache
        if answer is None or answer.cache is cache:
            self.cache = cache
        return answer is not None and answer.cache is cache


def restart(cache: PolicyCache, inputs: dict[str, Any], end: int | None) -> None:
    """Empty a cache for a forward of the whole text; its policy, and what is announced, stay.

    Args:
        cache: The cache that the model has dropped.
        inputs: The arguments of the forward.
        end: Columns at which the generation ends; None if unknown.

    Raises:
        KVPolicyError: If the forward has only a part of the text.
        KVPolicyStateError: If the cache holds what no forward of the text brings back.
    """
    if not cache.is_initialized:
        return
    tokens: Tensor = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
    columns = tokens.shape[1]
    _check_whole(cache, inputs, columns)
    _check_state(cache)
    known = cache.journal.known
    cache.reset()
    cache.journal.known = known
    new = None if end is None else max(end - columns, 0)
    cache.announced = Announced(forward_calls.row_lengths(inputs, columns), new)


def _check_whole(cache: PolicyCache, inputs: dict[str, Any], columns: int) -> None:
    mask = inputs.get("attention_mask")
    places = inputs.get("position_ids")
    is_part = columns <= cache.get_seq_length() or (mask is not None and mask.shape[-1] != columns)
    if is_part or (places is not None and bool((places[..., 0] != 0).any())):
        raise KVPolicyError(
            "The whole text must be run again where the angles of the rotary embedding change, since the model drops "
            f"the cache there, got {columns} of its tokens; try generate without prefill_chunk_size, or a new cache."
        )


def _check_state(cache: PolicyCache) -> None:
    what = "A forward that runs the whole text again, since the angles of the rotary embedding have changed,"
    cache.journal.refuse_changes(what)
    held = "a shared prefix" if cache.policy_layers[0].prefix_columns else ""
    if cache.holds_next or cache.journal.is_whole:
        held = "a prompt after hold_next()"
    if held:
        raise KVPolicyStateError(
            f"{what} must be on a cache that holds its text under one policy, got one with {held}; try a new cache, or "
            "a text that stays below that length."
        )


_CONTINUOUS = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")
"""Methods of transformers that generate with a paged cache of their own."""


def generating_module(model: nn.Module) -> nn.Module:
    """The module that implements `generate`: the model, or the one inside a wrapper such as a PEFT model."""
    return next((module for module in model.modules() if isinstance(module, GenerationMixin)), model)


def offer_cache(model: nn.Module, recent: RecentCache, deltas: RopeDeltas | None) -> list[Callable[[], None]]:
    """Let `generate` begin with a cache under the policy that knows how many tokens will come, and end with it.

    Args:
        model: The model that the policy is attached to.
        recent: Where the cache of the answer is noted.
        deltas: The offsets of its positions, which a given cache has of its own; None in a model without any.

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
        columns = forward_calls.prompt_columns(model_kwargs, generation_config)
        # transformers passes `max_length - 1`, since the last generated token is never an input.
        new = max(length + 1 - columns, 0) if columns else None
        policy = given.policy if isinstance(given, PolicyCache) else attachment_of(model).policy
        forward_calls.check_asked(policy, generation_config, mode)
        if not getattr(generation_config, "is_assistant", False):  # whose mask hides drafts that are padding tokens
            forward_calls.check_ends(model_kwargs)
        if isinstance(given, PolicyCache):
            forward_calls.check_conversation(given.get_seq_length(), columns)
            given.counts_columns = given.counts_padding()  # asked once: steps do not wait for the device
            given.expect(forward_calls.row_lengths(model_kwargs, columns), new or 0)
        # First, transformers checks its arguments and decides whether there is a cache at all.
        result = prepare(generation_config, model_kwargs, mode, batch, length, *rest)
        cache = model_kwargs.get(CACHE)
        if isinstance(cache, Cache) and not isinstance(given, PolicyCache | EncoderDecoderCache):
            forward_calls.check_stock(cache)
            prompt = forward_calls.row_lengths(model_kwargs, columns)
            forward_calls.become(cache, PolicyCache(model, prompt=prompt, new=new))
            if getattr(generation_config, "is_assistant", False):  # as transformers does with its own cache
                cache.activate_past_recording()
        if isinstance(cache, PolicyCache):
            recent.expect(cache, length + 1 if columns else None)
            ask_to_compile(inner, cache, generation_config)
        return result

    _set(inner, "_prepare_cache_for_generation", prepare_cache, undo)
    _set(inner, "generate", _noting(inner.generate, recent, deltas), undo)
    _set(inner, "prepare_inputs_for_generation", _keeping_cache(inner, recent), undo)
    compiler = StepCompiler(inner)
    _set(inner, "_valid_auto_compile_criteria", compiler.criteria, undo)
    _set(inner, "get_compiled_call", compiler.compiled_call, undo)
    for name in _CONTINUOUS:
        if hasattr(inner, name):
            _set(inner, name, _refuse_continuous_batching, undo)
    return undo


def _noting(generate: Callable[..., Any], recent: RecentCache, deltas: RopeDeltas | None) -> Callable[..., Any]:
    """Let `generate` note the cache of its answer, and take what it is given of a text that it goes on with.

    Before transformers 5.24, which refuses `cache=` as unused, it takes that name too.
    """

    @functools.wraps(generate)
    def noting(*args: Any, **kwargs: Any) -> Any:
        if CACHE == OLD:
            rename_cache(kwargs, OLD)
        given = passed_cache(kwargs)
        if isinstance(given, PolicyCache):
            forward_calls.check_text(given, args, kwargs)
            if deltas is not None:
                deltas.show(given)
        with recent.generating() as answer, _announcing(given):
            result = generate(*args, **kwargs)
            cache = output_cache(result)
            if answer is not None and isinstance(cache, PolicyCache):
                recent.cache = cache
        return result

    return noting


@contextmanager
def _announcing(cache: Cache | None) -> Generator[None]:
    """Leave a cache as it was, also a stock one, if a generation was refused before the first token."""
    kind = type(cache)
    held = {} if cache is None else vars(cache)
    is_ours = isinstance(cache, PolicyCache)
    announced = cache.announced if is_ours else None
    seen = cache.get_seq_length() if is_ours else 0
    try:
        yield
    except KVPolicyError:
        if isinstance(cache, PolicyCache) and not cache.forward.runs and cache.get_seq_length() == seen:
            if announced is not None:
                cache.announced = announced
            else:
                cache.__class__ = kind  # pyright: ignore[reportAttributeAccessIssue]
                cache.__dict__ = held
        raise


def _keeping_cache(inner: Any, recent: RecentCache) -> Callable[..., Any]:
    """Let a model that drops its cache in the middle of a generation run the whole text on the same one.

    A cache whose padded prompt was given no positions goes on without them. Only in a generation whose steps are
    compiled, the masks of the layers are made before the step.
    """
    prepare = inner.prepare_inputs_for_generation

    @functools.wraps(prepare)
    def keeping(*args: Any, **kwargs: Any) -> Any:
        given = next((each for each in (*args, *kwargs.values()) if isinstance(each, PolicyCache)), None)
        if given is None:
            return prepare(*args, **kwargs)
        with given.as_compileable(shown=given.compiles):
            inputs = prepare(*args, **kwargs)
        if given.compiles:
            keep_mask(given, kwargs.get("attention_mask"), inputs)
        if not any(isinstance(each, Cache) for each in inputs.values()):
            restart(given, inputs, recent.end_of(given))
            inputs |= cache_argument(inner, given)
        elif given.counts_columns:
            inputs.pop("position_ids", None)  # the model counts on as it counted the prompt
        return inputs

    return keeping


def _set(module: Any, name: str, value: Any, undo: list[Callable[[], None]]) -> None:
    """Shadow a method of a module by an attribute of the instance, which may have one already."""
    own = module.__dict__
    before = {name: own[name]} if name in own else {}
    setattr(module, name, value)

    def restore() -> None:
        own.pop(name, None)
        own.update(before)

    undo.append(restore)


def _refuse_continuous_batching(*args: Any, **kwargs: Any) -> Any:
    raise KVPolicyError(
        "Continuous batching (generate_batch) must run without a policy, since it has a paged cache of its own, got a "
        "model with one; try generate with a padded batch, or detach the policy."
    )
