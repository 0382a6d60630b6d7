"""The files that a policy reads, such as a calibration or a tuned plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpolicy.policy import Policy


def files_of(policy: Policy) -> list[str]:
    """The files and folders that the parts of a policy name, of those that exist.

    >>> from kvpolicy import Policy
    >>> files_of(Policy.parse("squeeze+kvcrush/h2o+kivi@0.2"))
    []
    """
    return [name for name in _strings(policy.to_dict()) if name and _exists(name)]


def _strings(value: Any) -> Iterator[str]:
    """All strings in nested values."""
    if isinstance(value, str):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _strings(getattr(value, field.name))
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # no path
        return False
