"""Whose answers lm-eval's request cache holds: its keys do not contain the policy."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from kvpolicy.text.errors import KVPolicyError

_FINGERPRINT = "__kvpolicy__"
"""The key of the fingerprint."""


def claim(answers: MutableMapping[str, Any], fingerprint: str) -> None:
    """Write into a request cache whose answers it holds.

    Args:
        answers: The request cache.
        fingerprint: Everything that an answer of this run depends on besides its request.

    Raises:
        KVPolicyError: If a run with another fingerprint filled it.
    """
    owner = answers.get(_FINGERPRINT) or ("a model other than kvpolicy" if len(answers) else None)
    if owner not in (None, fingerprint):
        raise KVPolicyError(
            f"The request cache must be of this run ({fingerprint}), got one filled by {owner}; try another "
            "--use_cache path."
        )
    answers[_FINGERPRINT] = fingerprint
