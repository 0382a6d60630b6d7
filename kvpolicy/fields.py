"""The types of hyper-parameters, checked where a strategy is made: later they would fail deep inside a forward."""

from __future__ import annotations

from dataclasses import fields
from numbers import Integral, Real
from typing import Any

_KINDS: dict[str, tuple[type, str]] = {
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
}


def check_types(strategy: Any) -> None:
    """Raise TypeError where a field that is annotated `int`, `float` or `bool` holds something else.

    Annotations are read as they were written, in a module that begins with `from __future__ import annotations`.

    Examples:
        >>> from kvpolicy import StreamingLLM
        >>> StreamingLLM(sinks=2.5)
        Traceback (most recent call last):
        TypeError: StreamingLLM's sinks is 2.5: give a whole number.
    """
    for field in fields(strategy):
        kind, words = _KINDS.get(str(field.type), (object, ""))
        value = getattr(strategy, field.name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
            raise TypeError(f"{type(strategy).__name__}'s {field.name} is {value!r}: give {words}.")
