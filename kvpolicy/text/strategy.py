"""`@strategy`, which makes a class of hyperparameters a part of a policy, and the constraints of its fields.

A field is checked by its annotation, and by the function that gives its default: `window: int = least(1, 32)`. Each of
them takes the default last. The value that a message suggests is the default.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, dataclass_transform

from kvpolicy.text.arguments import named_options
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.validation import CHECK, check_fields
from kvpolicy.text.validation import AutoFloat as AutoFloat
from kvpolicy.text.validation import AutoInt as AutoInt

T = TypeVar("T")
V = TypeVar("V")

WIDEST_KERNEL = 2**15 - 1
"""The widest pooling, which PyTorch has for half of it on each side."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def strategy(cls: type[T]) -> type[T]:
    """Make a class a frozen, slotted dataclass whose fields are given by name and checked.

    Checked are the types `int`, `float` and `bool`, also with `auto`, the values of a `Literal`, and the constraints of
    fields. A `__post_init__` runs afterwards, for what depends on several fields. See `named_options` for the rest.

    Examples:
        >>> from typing import Literal
        >>> @strategy
        ... class Newest:
        ...     window: int = least(1, 32)
        ...     pool: Literal["avg", "max"] = "avg"
        >>> Newest(window=8)
        Newest(window=8, pool='avg')
        >>> Newest(window=0)
        Traceback (most recent call last):
        kvpolicy.KVPolicyError: Newest.window must be at least 1, got 0; try 32.
        >>> Newest(pool="min")
        Traceback (most recent call last):
        kvpolicy.KVPolicyError: Newest.pool must be one of 'avg', 'max', got 'min'; try 'avg'.
    """
    check_together: Callable[[T], None] | None = getattr(cls, "__post_init__", None)

    def check(self: T) -> None:
        check_fields(self)
        if check_together is not None:
            check_together(self)

    setattr(cls, "__post_init__", check)  # noqa: B010  # not every class has the attribute
    return named_options(dataclass(frozen=True, kw_only=True, slots=True)(cls))


def least(low: float, default: V) -> V:
    """A number that is not below another one; `auto` is above any.

    Args:
        low: The smallest number allowed.
        default: The default.

    Examples:
        >>> from kvpolicy import KIVI
        >>> KIVI(group_size=0)
        Traceback (most recent call last):
        kvpolicy.KVPolicyError: KIVI.group_size must be at least 1, got 0; try 32.
    """
    return where(lambda value: value == "auto" or value >= low, f"at least {low}", default)


def between(low: float, high: float, default: V) -> V:
    """A number in a range, or `auto`.

    Args:
        low: The smallest number allowed.
        high: The largest number allowed.
        default: The default.

    Examples:
        >>> from kvpolicy import H2O
        >>> H2O(recent=2.0)
        Traceback (most recent call last):
        kvpolicy.KVPolicyError: H2O.recent must be between 0 and 1, got 2.0; try 0.5.
    """
    return where(lambda value: value == "auto" or low <= value <= high, f"between {low} and {high}", default)


def fraction(default: float) -> float:
    """A fraction above 0 and at most 1.

    Examples:
        >>> from kvpolicy import AttentionMass
        >>> AttentionMass(share=0.0)
        Traceback (most recent call last):
        kvpolicy.KVPolicyError: AttentionMass.share must be greater than 0 and at most 1, got 0.0; try 0.975.
    """
    return where(lambda value: 0 < value <= 1, "greater than 0 and at most 1", default)


def finite(low: float, default: float, *, example: float | None = None) -> float:
    """A number that is not below another one, and not infinite.

    Args:
        low: The smallest number allowed.
        default: The default.
        example: A value that works, for the message; the default if that is one.

    Examples:
        >>> from kvpolicy import Pyramid
        >>> Pyramid(beta=float("inf"))
        Traceback (most recent call last):
        kvpolicy.KVPolicyError: Pyramid.beta must be at least 1 and finite, got inf; try 20.0.
    """
    return where(lambda value: low <= value < math.inf, f"at least {low} and finite", default, example=example)


def odd(default: int) -> int:
    """The width of a pooling that has a middle.

    Examples:
        >>> from kvpolicy import SnapKV
        >>> SnapKV(kernel=4)
        Traceback (most recent call last):
        kvpolicy.KVPolicyError: SnapKV.kernel must be an odd number between 1 and 32767, got 4; try 7.
    """

    def is_odd(value: int) -> bool:
        return 1 <= value <= WIDEST_KERNEL and value % 2 == 1

    return where(is_odd, f"an odd number between 1 and {WIDEST_KERNEL}", default, example=7)


def tiny_or(what: str) -> str:
    """The name of what was calibrated, a file or a folder; the default is `tiny`, which kvpolicy ships.

    Examples:
        >>> from kvpolicy import QFilters
        >>> QFilters(file="")
        Traceback (most recent call last):
        kvpolicy.KVPolicyError: QFilters.file must be a file or 'tiny', got an empty string; try 'tiny'.
    """

    def check(name: str, value: str) -> None:
        if not value:
            raise KVPolicyError(f"{name} must be {what} or 'tiny', got an empty string; try 'tiny'.")

    return checked(check, "tiny")


def where(holds: Callable[[Any], bool], expected: str, default: V, *, example: object = None) -> V:
    """A value for which `holds` is true.

    Args:
        holds: Whether a value of the annotated type is allowed; false for NaN.
        expected: What is allowed, in words, after "must be".
        default: The default.
        example: A value that works, for the message; the default if that is one.

    Raises:
        KVPolicyError: By the strategy, for another value.

    Examples:
        >>> from kvpolicy import GEAR
        >>> GEAR(sparse=1.0)
        Traceback (most recent call last):
        kvpolicy.KVPolicyError: GEAR.sparse must be at least 0 and less than 1, got 1.0; try 0.02.
    """
    proposed = default if example is None else example

    def check(name: str, value: object) -> None:
        if not holds(value):
            raise KVPolicyError(f"{name} must be {expected}, got {value!r}; try {proposed!r}.")

    return checked(check, default)


def checked(check: Callable[[str, Any], None], default: Any) -> Any:
    """A field whose value a function checks.

    Args:
        check: Raises an error about a value. It is given the name of the field, such as `KIVI.bits`, and the value.
        default: The default. A class is called for it, once for each instance, as `SnapKV` for a base.
    """
    metadata = {CHECK: check}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)
