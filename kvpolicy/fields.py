"""Hyper-parameters, checked where a strategy is made: later they would fail deep inside a forward."""

from __future__ import annotations

from dataclasses import fields
from numbers import Integral, Real
from typing import Any

MOST = 2**31
"""Whole numbers are below it: torch's operators take no larger ones."""

_KINDS: dict[str, tuple[type, str]] = {
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
}


def check_fields(strategy: Any) -> None:
    """Check the fields that are annotated `int`, `float` or `bool`, and give equal numbers one form.

    So equal strategies have equal words: of a field that is a float, 1 becomes 1.0 and -0.0 becomes 0.0; where a
    `Literal` lists whole numbers, 4.0 becomes 4. Annotations are read as they were written, in a module that begins
    with `from __future__ import annotations`.

    Raises:
        TypeError: Where a value is of another type.
        ValueError: Where a whole number is too large for any use.

    Examples:
        >>> from kvpolicy import H2O, StreamingLLM
        >>> H2O(recent=1)
        H2O(recent=1.0, decode='evict')
        >>> StreamingLLM(sinks=2.5)
        Traceback (most recent call last):
        TypeError: StreamingLLM's sinks is 2.5: give a whole number.
    """
    for field in fields(strategy):
        annotation, value = str(field.type), getattr(strategy, field.name)
        where = f"{type(strategy).__name__}'s {field.name} is {value!r}"
        kind, words = _KINDS.get(annotation, (object, ""))
        if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
            raise TypeError(f"{where}: give {words}.")
        if annotation == "int":
            if not -MOST <= value < MOST:
                raise ValueError(f"{where}: give a number below 2^31.")
            value = int(value)
        elif annotation == "float":
            value = float(value) + 0.0
        elif annotation.startswith("Literal[") and isinstance(value, float) and value.is_integer():
            value = int(value)
        object.__setattr__(strategy, field.name, value)
