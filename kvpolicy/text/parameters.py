"""A check of hyperparameters that are no fields of a strategy, with a message of the same form."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from kvpolicy.text.errors import KVPolicyError


def check_min(options: Any, **minimums: int) -> None:
    """Raise KVPolicyError if a field is below its minimum.

    Args:
        options: A dataclass instance.
        **minimums: The minimum of each field, by name.
    """
    defaults = {field.name: field.default for field in fields(options)}
    for field, minimum in minimums.items():
        value = getattr(options, field)
        if not value >= minimum:
            example = "" if defaults[field] is MISSING else f"; try {defaults[field]!r}"
            name = f"{type(options).__name__}.{field}"
            raise KVPolicyError(f"{name} must be at least {minimum}, got {value!r}{example}.")
