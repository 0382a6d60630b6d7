"""lm-eval's request cache: whose answers it holds, which its keys do not say, and which prefixes they were behind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from lm_eval.api.model import hash_args

from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.tables import shorten
from kvpolicy_lm_eval.held_back import HeldBack

_FINGERPRINT = "__kvpolicy__"
"""The key of the fingerprint."""
_PREFIXES = "__kvpolicy_prefixes__"
"""The key of the lengths of common prefixes."""


class RequestCache:
    """The request cache of a run.

    Args:
        answers: What it holds; None if there is none.
    """

    def __init__(self, answers: MutableMapping[str, Any] | None) -> None:
        """Nothing is read yet."""
        self._answers = answers

    def claim(self, fingerprint: str) -> None:
        """Write into the cache whose answers it holds.

        Args:
            fingerprint: Everything that an answer of this run depends on besides its request.

        Raises:
            KVPolicyError: If a run with another fingerprint filled it.
        """
        answers = self._answers
        if answers is None:
            return
        owner = answers.get(_FINGERPRINT) or ("a model other than kvpolicy" if len(answers) else None)
        if owner not in (None, fingerprint):
            raise KVPolicyError(
                f"The request cache must be of this run ({fingerprint}), got one filled by {owner}; try another "
                "--use_cache path."
            )
        answers[_FINGERPRINT] = fingerprint

    def check_distinct(self, groups: Mapping[tuple[str, HeldBack], Iterable[int]], requests: Sequence[Any]) -> None:
        """Check that equal requests have equal answers, since the cache would hold one of them for all.

        Args:
            groups: The indices of the requests, by their task and by what they hold back.
            requests: The requests of lm-eval.

        Raises:
            KVPolicyError: If there is a cache, and two requests are equal but for what they hold back.
        """
        if self._answers is None:
            return
        found: dict[str, tuple[str, HeldBack]] = {}
        for (task, held_back), members in groups.items():
            for index in members:
                key = json.dumps(requests[index].args, default=str)
                other, its_own = found.setdefault(key, (task, held_back))
                if its_own != held_back:
                    raise KVPolicyError(
                        "Tasks with one request cache must have different prompts where they hold back different "
                        f"texts, got {shorten(requests[index].args[0])!r} in {other} and {task}; try a --use_cache "
                        "path for each."
                    )

    def prefixes_of(self, kind: str, requests: Sequence[Any]) -> list[int | None]:
        """The tokens that each request shared with others in a run of this cache; None for those that are new.

        Without some of them, which were answered meanwhile, the others would share less.

        Args:
            kind: The type of the requests.
            requests: The arguments of each.
        """
        known: dict[str, int] = {} if self._answers is None else self._answers.get(_PREFIXES, {})
        return [known.get(hash_args(kind, request)) for request in requests] if known else [None] * len(requests)

    def note_prefixes(self, kind: str, requests: Sequence[Any], lengths: Sequence[int]) -> None:
        """Write into the cache how many tokens each request shares with others.

        Args:
            kind: The type of the requests.
            requests: The arguments of each.
            lengths: The tokens of its common prefix; 0 if it shares none.
        """
        if self._answers is not None:
            keys = [hash_args(kind, request) for request in requests]
            self._answers[_PREFIXES] = self._answers.get(_PREFIXES, {}) | dict(zip(keys, lengths, strict=True))
