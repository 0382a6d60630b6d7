"""Compatibility with versions of transformers: names of its arguments and classes, and versions that are too old.

The argument through which it passes a cache is `past_key_values`, renamed to `cache` in 5.24. Later versions take the
old name with a warning, so that hooks see either. Which one a module takes is read from its forward, since a model with
code of its own may keep the old name.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import transformers
from torch import nn
from transformers import cache_utils
from transformers.cache_utils import Cache
from transformers.generation.utils import ALL_CACHE_NAMES

from kvpolicy.text.errors import KVPolicyError


class _NoSuchLayer:
    """Before transformers 5.23, such a layer has an empty state in a stock cache, so that no layer is of this class."""


DummyLayer: Any = getattr(cache_utils, "DummyLayer", _NoSuchLayer)
"""The class of transformers."""


NEW = "cache"
OLD = "past_key_values"

NAMES = (NEW, OLD)
"""Names of the cache among the arguments of a decoder, and of `generate`."""

LAYER_NAMES = (*NAMES, "layer_past")
"""Names of the cache among the arguments of decoder layers and of their attention."""

CACHE = NEW if NEW in ALL_CACHE_NAMES else OLD
"""The name in this version of transformers: of the argument of `generate`, and of the field of outputs."""


def cache_name(module: nn.Module) -> str:
    """The name of the cache in a module's forward; in that of what is inside, where a wrapper names no arguments."""
    inside = (_name_in(type(part)) for part in module.modules())
    return next(filter(None, inside), CACHE)


@functools.cache
def _name_in(kind: type[nn.Module]) -> str:
    """The name of the cache in the forward of a class; empty if it names none."""
    parameters = inspect.signature(kind.forward).parameters
    return next((name for name in NAMES if name in parameters), "")


def cache_argument(module: nn.Module, cache: Cache | None) -> dict[str, Cache | None]:
    """A cache as the keyword argument of a module's forward.

    Args:
        module: A model, a decoder, or a wrapper around one.
        cache: The cache; None for a forward that makes one.

    Returns:
        `{"cache": cache}`, or `{"past_key_values": cache}`.
    """
    return {cache_name(module): cache}


def passed_cache(arguments: dict[str, Any], names: tuple[str, ...] = NAMES) -> Any:
    """The cache among the arguments of a call, under either name; None without one."""
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


def rename_cache(arguments: dict[str, Any], name: str) -> None:
    """Pass the cache of a call under one name only, in place: of two names, transformers drops one with a warning."""
    if any(other in arguments for other in NAMES if other != name):
        cache = passed_cache(arguments)
        for other in NAMES:
            arguments.pop(other, None)
        arguments[name] = cache


def output_cache(output: Any) -> Any:
    """The cache in the output of a model or of `generate`; None if it has none."""
    # Not both in turn: with a version that has the new name, reading the old one logs a warning.
    return getattr(output, CACHE, None) if hasattr(output, CACHE) else getattr(output, OLD, None)


OLDEST = (5, 18)
"""The oldest version that is tested; `pyproject.toml` has it too."""


def check_version() -> None:
    """Refuse a version of transformers that is too old.

    Raises:
        KVPolicyError: Naming the version.
    """
    found = tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2]))
    if found < OLDEST:
        raise KVPolicyError(
            f"transformers must be {'.'.join(map(str, OLDEST))} or newer, got {transformers.__version__}; try pip "
            "install --upgrade transformers."
        )


def check_cache_name(decoder: nn.Module) -> None:
    """Refuse a decoder that takes its cache under an unknown name: its layers would never see the policy's cache.

    Raises:
        KVPolicyError: Naming the version, which may have renamed the argument.
    """
    names = inspect.signature(type(decoder).forward).parameters
    if not any(name in names for name in NAMES):
        raise KVPolicyError(
            f"The decoder must take its cache as {' or '.join(NAMES)}, got {type(decoder).__name__} of transformers "
            f"{transformers.__version__}, which does not; try an older transformers."
        )
