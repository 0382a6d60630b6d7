"""Strategies and their hyper-parameters, checked where they are made: later they would fail deep inside a forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from kvpolicy.spec.errors import KVPolicyError, KVPolicyTypeError

MOST = 2**31
"""Whole numbers are below it: torch's operators take no larger ones."""

_KINDS: dict[str, tuple[type, Callable[[Any], Any], str]] = {
    "int": (Integral, int, "a whole number"),
    "float": (Real, lambda value: float(value) + 0.0, "a number"),
    "bool": (bool, bool, "True or False"),
}
"""By annotation: what a value must be, what makes it one of its form, and what to ask for."""


def check_instance(what: str, part: object) -> None:
    """Raise KVPolicyTypeError where a class stands in the place of an instance; `what` is what it should be.

    Examples:
        >>> check_instance("codec", int)
        Traceback (most recent call last):
        kvpolicy.KVPolicyTypeError: The codec is the class int: give an instance, int().
    """
    if isinstance(part, type):
        raise KVPolicyTypeError(f"The {what} is the class {part.__name__}: give an instance, {part.__name__}().")


def check_fields(strategy: Any) -> None:
    """Check the fields that are annotated `int`, `float` or `bool`, and give equal numbers one form.

    So equal strategies have equal words: of a field that is a float, 1 becomes 1.0 and -0.0 becomes 0.0; where a
    `Literal` lists whole numbers, 4.0 becomes 4. Annotations are read as they were written, in a module that begins
    with `from __future__ import annotations`.

    Raises:
        KVPolicyTypeError: Where a value is of another type.
        KVPolicyError: Where a whole number is too large for any use.

    Examples:
        >>> from kvpolicy import H2O, StreamingLLM
        >>> H2O(recent=1)
        H2O(recent=1.0, decode='evict')
        >>> StreamingLLM(sinks=2.5)
        Traceback (most recent call last):
        kvpolicy.KVPolicyTypeError: StreamingLLM's sinks is 2.5: give a whole number.
    """
    for field in fields(strategy):
        annotation, value = str(field.type), getattr(strategy, field.name)
        if annotation in _KINDS:
            value = _in_form(annotation, value, f"{type(strategy).__name__}'s {field.name}")
        elif annotation.startswith("Literal[") and isinstance(value, float) and value.is_integer():
            value = int(value)
        object.__setattr__(strategy, field.name, value)


def _in_form(annotation: str, value: Any, name: str) -> Any:
    kind, make, words = _KINDS[annotation]
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise KVPolicyTypeError(f"{name} is {value!r}: give {words}.")
    if annotation == "int" and not -MOST <= value < MOST:
        raise KVPolicyError(f"{name} is {value!r}: give a number below 2^31.")
    return make(value)
