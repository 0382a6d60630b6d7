"""Which prefixes the requests of a run share, as in earlier runs with the same request cache."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from kvpolicy_lm_eval.prefixes import Tokens
from kvpolicy_lm_eval.request_cache import RequestCache
from kvpolicy_lm_eval.request_groups import Sharing, TaskGroups, share_prefixes
from kvpolicy_lm_eval.scoring import Prefixes

log = logging.getLogger("lm_eval.kvpolicy")


class PrefixSearch:
    """Finds common prefixes, and keeps those of requests whose answers may be in a request cache.

    Attributes:
        least: The fewest tokens of a prefix; 0 if requests are not grouped.
        cache: The request cache of the run.
    """

    def __init__(self, least: int) -> None:
        """Nothing is found, and there is no request cache."""
        self.least = least
        self.cache = RequestCache(None)
        self._sharing = 0

    @contextmanager
    def of(self, kind: str, requests: int) -> Generator[None]:
        """Say at the end if no requests of those that are answered meanwhile share a prefix; `share` may come before.

        Args:
            kind: Their type.
            requests: How many there are.
        """
        try:
            yield
            if self.least and not self._sharing and kind != "loglikelihood_rolling":
                log.warning(
                    "group_by_prefix changes nothing for %d %s requests, since no two of a task begin with the same %d "
                    "tokens that are compressed; group_by_prefix=N sets another minimum",
                    requests,
                    kind,
                    self.least,
                )
        finally:
            self._sharing = 0

    def share(self, kind: str, groups: TaskGroups, requests: Sequence[Any], prompts: Sequence[Tokens]) -> list[Sharing]:
        """Group prompts to generate from by their common prefixes; see `share_prefixes`.

        Args:
            kind: The type of the requests.
            groups: Their indices, by task and by what they hold back.
            requests: The requests of lm-eval.
            prompts: Token ids of the prompt of each.
        """
        arguments = [request.args for request in requests]
        found = share_prefixes(groups, prompts, self.least, self.cache.prefixes_of(kind, arguments))
        self._note(kind, arguments, {index: len(some.prefix) for some in found for index in some.members})
        return found

    def of_scored(self, requests: Sequence[Any]) -> Prefixes | None:
        """Which prefixes the contexts of requests that are scored share; None if they are not grouped.

        Args:
            requests: The texts, and token ids of the context and the answer, of each.
        """
        if not self.least:
            return None
        pairs = [pair for pair, _, _ in requests]
        known = self.cache.prefixes_of("loglikelihood", pairs)
        return Prefixes(self.least, known, partial(self._note, "loglikelihood", pairs))

    def _note(self, kind: str, arguments: Sequence[Any], lengths: Mapping[int, int]) -> None:
        self.cache.note_prefixes(kind, [arguments[index] for index in lengths], [*lengths.values()])
        self._sharing += sum(length > 0 for length in lengths.values())
