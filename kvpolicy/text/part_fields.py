"""Strategies as plain data: a name, and every field by its own name.

A spec leaves defaults out, so that it means what the installed version takes them to be. What is stored for later
states every field: `{"kvcrush": {"split": 0.25, ..., "base": {"h2o": {"recent": 0.5, ...}}}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpolicy.registry import Kind, described, lookup, name_of
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.grammar import WRAPPING, fields_of
from kvpolicy.text.tables import shorten


def part_to_dict(part: object) -> dict[str, dict[str, Any]]:
    """The name of a strategy and all its fields.

    Raises:
        KVPolicyError: If the strategy is not registered, or a field holds an object.

    Examples:
        >>> from kvpolicy import TOVA
        >>> part_to_dict(TOVA())
        {'tova': {'decode': 'evict'}}
    """
    content: dict[str, Any] = {}
    name = name_of(type(part))
    for key in fields_of(type(part)):
        value = getattr(part, key)
        if key in WRAPPING and value is not None:
            content[key] = part_to_dict(value)
        elif _is_plain(value):
            content[key] = value
        else:
            raise KVPolicyError(
                f"Every option must be a number, a bool, a string or None to be stored, got a {type(value).__name__} "
                f"as {key!r} of {name!r}."
            )
    return {name: content}


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def part_from_dict(kind: Kind, content: object) -> Any:
    """The strategy that `part_to_dict` described.

    Args:
        kind: The kind that it must be of.
        content: Its name and fields. A field that is missing has its default, and former names of fields are known.

    Raises:
        KVPolicyError: If it does not describe a strategy of this kind.

    Examples:
        >>> part_from_dict("selector", {"window": {}})
        SlidingWindow(decode='evict')
    """
    if not (isinstance(content, Mapping) and len(content) == 1):
        raise KVPolicyError(f"A {described(kind)} must be one name with its fields, got {shorten(repr(content))}.")
    ((name, given),) = content.items()
    found, cls = lookup(str(name))
    if found != kind or not isinstance(given, Mapping):
        raise KVPolicyError(f"A {described(kind)} must be described, got {shorten(repr(content))}.")
    aliases: Mapping[str, str] = getattr(cls, "ALIASES", {})
    former: Mapping[str, Mapping[str, Any]] = getattr(cls, "VALUE_ALIASES", {})
    known = fields_of(cls)
    # What strategies do with text, such as open a file of that name, would fail otherwise with any error.
    texts = {key for key, field in known.items() if str(field.type) in ("str", "str | None")}
    options: dict[str, Any] = {}
    for key, value in given.items():
        key = aliases.get(key, key)
        if key not in known:
            raise KVPolicyError(f"The fields of {name!r} must be among {', '.join(known)}, got {shorten(key)!r}.")
        if key in WRAPPING and value is not None:
            value = part_from_dict("head_allocator" if key == "heads" else kind, value)
        elif not _is_plain(value) or (key in texts and not isinstance(value, str | None)):
            raise KVPolicyError(
                f"{key!r} of {name!r} must be {'a string' if key in texts else 'a number, a bool, a string or None'}, "
                f"got {shorten(repr(value))}."
            )
        elif isinstance(value, str):
            value = former.get(key, {}).get(value, value)
        options[key] = value
    try:
        return cls(**options)
    except TypeError as error:
        raise KVPolicyError(f"The strategy {name!r} could not be created: {error}") from error
