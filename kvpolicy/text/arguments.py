"""Answers to wrong arguments of a call: one sentence with the option that was probably meant.

Options have other names in other libraries. `suggest_option` knows the common ones, and compares the spelling of the
rest; the grammar of specs and the calls of Python share it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from kvpolicy.registry import suggest
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.tables import shorten
from kvpolicy.text.validation import check_fields

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

TERMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("window_size", "window_length", "obs_window", "observation_window"), ("window", "recent")),
    **dict.fromkeys(("recent_size", "recent_ratio", "n_recent", "n_local"), ("recent", "window")),
    **dict.fromkeys(("n_sink", "n_sinks", "num_sinks", "num_sink_tokens", "sink_size", "start_size"), ("sinks",)),
    **dict.fromkeys(("kernel_size", "pool_kernel_size"), ("kernel",)),
    **dict.fromkeys(("nbits", "n_bits", "num_bits", "kv_bits", "q_bits"), ("bits",)),
    **dict.fromkeys(("k_bits", "nbits_key"), ("key_bits", "bits")),
    **dict.fromkeys(("v_bits", "nbits_value"), ("value_bits", "bits")),
    **dict.fromkeys(("q_group_size", "block"), ("group_size", "block_size")),
    **dict.fromkeys(("residual", "buffer_size"), ("residual_length",)),
    **dict.fromkeys(("pooling", "pool_type"), ("pool",)),
    **dict.fromkeys(("top_k", "topk", "token_budget"), ("read", "budget")),
    **dict.fromkeys(("page_size", "chunk_size"), ("page", "chunk", "block_size")),
    **dict.fromkeys(("press", "method", "strategy", "spec"), ("policy", "base", "selector")),
    **dict.fromkeys(("quantizer", "quantization", "quantization_config", "cache_config"), ("codec",)),
    **dict.fromkeys(("batch_size", "num_sequences"), ("batch",)),
    **dict.fromkeys(("prompt_length", "prompt_len", "seq_len", "context_length", "max_length"), ("prompt",)),
    **dict.fromkeys(("max_tokens", "new_tokens", "num_new_tokens"), ("max_new_tokens", "new")),
    "max_new_tokens": ("new",),
    "torch_dtype": ("dtype",),
    **dict.fromkeys(("tp_size", "tensor_parallel_size", "num_ranks"), ("tp",)),
}
"""Names of options in kvpress, transformers and papers, and those that may be meant, the most likely first."""

BUDGETS = {
    *("compression_ratio", "ratio", "keep_ratio", "retain_ratio", "kv_ratio", "heavy_ratio", "budget", "budget_size"),
    *("max_capacity_prompt", "max_capacity", "max_cache_len", "max_cache_size", "cache_budget", "cache_size"),
    *("token_budget", "hh_size"),
}
"""Names of what is a budget here: the amount that is kept, of the whole policy."""


def suggest_option(word: str, known: Iterable[str], value: str = "", *, budget: str = "budget={}") -> str:
    """The end of a sentence about an unknown option: what it is called here, or one of similar spelling.

    Args:
        word: The unknown option.
        known: The names of all options.
        value: The given value, as a user would write it; empty if that does not belong in a message.
        budget: How a budget is written where the option was given, with `{}` for the amount.

    Examples:
        >>> suggest_option("window_size", ["window", "kernel"], "32")
        '; try window=32.'
        >>> suggest_option("compression_ratio", ["policy", "budget"], "0.7")
        '; try budget=0.3, the fraction that is kept.'
        >>> suggest_option("windw", ["window", "kernel"], "32")
        "; did you mean 'window'?"
    """
    known = list(known)
    # `token_budget` is the option `read` where there is one, and a budget elsewhere.
    if word in BUDGETS and not any(name in known for name in TERMS.get(word, ()) if name != "budget"):
        kept, meaning = _kept(word, value)
        return f"; try {budget.format(kept)}{meaning}."
    for name in TERMS.get(word, ()):
        if name in known:
            return f"; try {name}={value or '...'}."
    return suggest(word, known)


def _kept(word: str, value: str) -> tuple[str, str]:
    """The budget that another library's option stands for, and what it means if that differs."""
    try:
        number = float(value)
    except ValueError:
        return "0.2", ""
    if word == "compression_ratio":  # the fraction that is removed
        return (f"{1 - number:.4g}", ", the fraction that is kept") if 0 <= number < 1 else ("0.2", "")
    return value, ""


_texts: dict[str, Callable[[Any], str]] = {}
"""How options are written in a spec: `spec`, which the grammar provides, since it imports this module."""


def write_options_by(text: Callable[[Any], str]) -> None:
    """Set the function that writes options as in a spec; it raises KVPolicyError for those that no spec has."""
    _texts["spec"] = text


def named_options(cls: type[T]) -> type[T]:
    """Make a dataclass of options answer wrong arguments with one sentence.

    It stands above `@dataclass`. The signature, the fields and `dataclasses.replace` are as before. The fields of a
    class without `__post_init__` are checked by `check_fields`. Options are equal if their values are, and have the
    same types: 1 may be one token, and 1.0 all of them. `str` of a part is its text in a spec, `repr` that of Python.

    Examples:
        >>> from dataclasses import dataclass
        >>> @named_options
        ... @dataclass(frozen=True, kw_only=True, slots=True)
        ... class Newest:
        ...     window: int = 32
        >>> Newest(window_size=8)
        Traceback (most recent call last):
        kvpolicy.KVPolicyTypeError: The options of Newest must be among window, got 'window_size'; try window=8.
        >>> Newest(8)
        Traceback (most recent call last):
        kvpolicy.KVPolicyTypeError: The options of Newest must be given by name, got 8; try Newest(window=8).
    """
    initialize: Callable[..., None] = cls.__init__
    if dataclasses.is_dataclass(cls):
        cls.__eq__ = _telling_types_apart(cls.__eq__)
        if not hasattr(cls, "__post_init__"):
            initialize = _checking(initialize)
        if cls.__str__ is object.__str__:
            cls.__str__ = _text
    cls.__init__ = _answering(initialize, cls)
    return cls


def _text(self: object) -> str:
    """The text of options in a spec, or that of Python if they have none."""
    try:
        return _texts["spec"](self)
    except (KeyError, KVPolicyError):
        return repr(self)


def _telling_types_apart(equal: Callable[[Any, object], bool]) -> Callable[[Any, object], bool]:
    """Equality of options that also compares the types of their values: 1 is one token, and 1.0 is all of them."""

    @functools.wraps(equal)
    def call(self: Any, other: object) -> bool:
        same = equal(self, other)
        if same is not True:  # NotImplemented, for an object of another class
            return same
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in dataclasses.fields(self))
        return all(type(mine) is type(theirs) for mine, theirs in pairs)

    return call


def _checking(initialize: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(initialize)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        check_fields(self)

    return call


def named_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function answer wrong arguments with one sentence; its signature is as before."""
    return _answering(function, None)


def _answering(function: Callable[P, R], cls: type[Any] | None) -> Callable[P, R]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if isinstance(error, KVPolicyError):
                raise
            message = _explain(function, cls, args, kwargs)
            if not message:  # the arguments are fine, and the error is of the function itself
                raise
        # Outside the `except` block, so that Python's own error is not shown as its context.
        raise KVPolicyTypeError(message)

    return call


def _explain(
    function: Callable[..., Any], cls: type[Any] | None, args: tuple[Any, ...], given: Mapping[str, Any]
) -> str:
    """The error message for the arguments of a call; empty if they are valid."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **given)
        return ""
    except TypeError:
        pass
    parameters = list(signature.parameters.values())
    if cls is not None:
        parameters = parameters[1:]
        args = args[1:]
    name = function.__name__ if cls is None else cls.__name__
    noun = "options" if dataclasses.is_dataclass(cls) else "arguments"
    known = [one.name for one in parameters]
    for key, value in given.items():
        if key not in known:
            return _unknown(name, noun, known, cls, key, value)
    positional = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
    if len(args) > len(positional):
        return _too_many(name, noun, parameters, cls, args)
    twice = [key for key in positional[: len(args)] if key in given]
    if twice:
        return f"Every argument of {name} must be given once, got {twice[0]!r} twice."
    required = [one.name for one in parameters if one.default is one.empty]
    missing = [key for key in required if key not in given and key not in positional[: len(args)]]
    return f"{name} must be given {_listed(required)}, got no {_listed(missing)}."


def _unknown(name: str, noun: str, known: list[str], cls: type[Any] | None, key: str, value: Any) -> str:
    aliases: Mapping[str, str] = getattr(cls, "ALIASES", {})
    shown = repr(value) if isinstance(value, bool | int | float | str) else ""
    shown = shown if len(shown) <= 30 else ""
    if "budget" in known:
        budget = "budget={}"
    elif "policy" in known:
        budget = "policy='snapkv@{}'"
    else:  # of a method: the budget is that of the policy which the method is a part of
        budget = "Policy(..., budget={})"
    advice = f"; try {aliases[key]}={shown or '...'}." if key in aliases else ""
    advice = advice or suggest_option(key, known, shown, budget=budget)
    if advice == "." and "policy" in known:
        advice = "; the options of a method belong to the policy, as in policy='snapkv:window=32'."
    if not known:
        return f"{name} must be given without {noun}, got {shorten(key)!r}{advice}"
    return f"The {noun} of {name} must be among {', '.join(known)}, got {shorten(key)!r}{advice}"


def _too_many(
    name: str, noun: str, parameters: list[inspect.Parameter], cls: type[Any] | None, args: tuple[Any, ...]
) -> str:
    by_position = sum(one.kind is not one.KEYWORD_ONLY for one in parameters)
    value = args[by_position]
    shown = shorten(repr(value))
    if cls is not None and hasattr(cls, "parse") and isinstance(value, str):
        return f"The {noun} of {name} must be given by name, got {shown}; try {name}.parse({shown})."
    free = parameters[by_position:]
    if not free:
        return f"{name} must be given at most {by_position} {noun}, got {len(args)}."
    option = next((one for one in free if _fits(value, one)), None)
    example = [f"{one.name}=..." for one in free[:3]] if option is None else [f"{option.name}={shown}"]
    example = ["..."] * min(by_position, 1) + example
    return f"The {noun} of {name} must be given by name, got {shown}; try {name}({', '.join(example)})."


def _fits(value: Any, parameter: inspect.Parameter) -> bool:
    """Whether a value may be meant for a parameter: of the type of its default, or a strategy for one that wraps."""
    if parameter.name in ("base", "heads", "policy"):
        return hasattr(value, "__dataclass_fields__")
    return not isinstance(value, bool) and type(value) is type(parameter.default)


def _listed(names: list[str]) -> str:
    """Names as a sentence has them.

    >>> _listed(["model", "policy"])
    'model and policy'
    """
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else ""
