"""Versions of what is written for other programs: which kvpolicy wrote it, and in which form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpolicy.spec.errors import KVPolicyError


def stamp(number: int) -> dict[str, Any]:
    """What every file and dictionary begins with.

    Args:
        number: Of the format; one more whenever a reader of the old one would misread the new one.

    Examples:
        >>> sorted(stamp(1))
        ['format', 'kvpolicy']
    """
    from kvpolicy import __version__

    return {"format": number, "kvpolicy": __version__}


def check_format(content: Mapping[str, Any], newest: int, what: object) -> None:
    """Refuse what a newer kvpolicy wrote; what has no number is older than the numbers.

    Args:
        content: What was read.
        newest: The newest format that this kvpolicy reads.
        what: What to call it.

    Raises:
        KVPolicyError: Where the format is newer, or no whole number.

    Examples:
        >>> check_format({"format": 3, "kvpolicy": "9.0"}, 2, "a.json")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        kvpolicy.KVPolicyError: a.json has format 3, written by ...
    """
    number = content.get("format", 0)
    if not isinstance(number, int) or isinstance(number, bool):
        raise KVPolicyError(f"{what} has the format {number!r}, and a whole number was expected: write it anew.")
    if number > newest:
        writer = content.get("kvpolicy", "of a later version")
        raise KVPolicyError(
            f"{what} has format {number}, written by kvpolicy {writer}, and this kvpolicy reads up to {newest}: update "
            "kvpolicy."
        )
