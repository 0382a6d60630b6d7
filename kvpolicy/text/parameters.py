"""Checks of a strategy's hyperparameters, with messages of one form.

They are called in `__post_init__`. The value that a message suggests is the default of the field.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from kvpolicy.text.errors import KVPolicyError


def check_min(strategy: Any, **minimums: int) -> None:
    """Raise KVPolicyError if a field is below its minimum; `auto` is above any.

    Args:
        strategy: A dataclass instance.
        **minimums: The minimum of each field, by name.

    Examples:
        >>> from kvpolicy import KIVI
        >>> KIVI(group_size=0)
        Traceback (most recent call last):
        kvpolicy.KVPolicyError: KIVI.group_size must be at least 1, got 0; try 32.
    """
    for field, minimum in minimums.items():
        value = getattr(strategy, field)
        if value != "auto" and not value >= minimum:
            raise _error(strategy, field, f"at least {minimum}")


def check_range(strategy: Any, **ranges: tuple[float, float]) -> None:
    """Raise KVPolicyError if a field is outside its range.

    Args:
        strategy: A dataclass instance.
        **ranges: The lowest and the highest allowed value of each field, by name.

    Examples:
        >>> from kvpolicy import H2O
        >>> H2O(recent=2.0)
        Traceback (most recent call last):
        kvpolicy.KVPolicyError: H2O.recent must be between 0 and 1, got 2.0; try 0.5.
    """
    for field, (low, high) in ranges.items():
        if not low <= getattr(strategy, field) <= high:  # also true for NaN
            raise _error(strategy, field, f"between {low} and {high}")


def check_choice(strategy: Any, **choices: tuple[object, ...]) -> None:
    """Raise KVPolicyError if a field has a value that is not in its list.

    Args:
        strategy: A dataclass instance.
        **choices: The allowed values of each field, by name.

    Examples:
        >>> from kvpolicy import KIVI
        >>> KIVI(bits=3)
        Traceback (most recent call last):
        kvpolicy.KVPolicyError: KIVI.bits must be one of 2, 4, 8, got 3; try 2.
    """
    for field, allowed in choices.items():
        if getattr(strategy, field) not in allowed:
            raise _error(strategy, field, f"one of {', '.join(map(repr, allowed))}")


def _error(strategy: Any, field: str, expected: str) -> KVPolicyError:
    (default,) = (each.default for each in fields(strategy) if each.name == field)
    example = "" if default is MISSING else f"; try {default!r}"
    name = f"{type(strategy).__name__}.{field}"
    return KVPolicyError(f"{name} must be {expected}, got {getattr(strategy, field)!r}{example}.")
