"""The batch size `auto`, which is measured as seldom as possible: a measurement takes several forward passes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvpolicy_lm_eval.scoring import Request, tokens_of

log = logging.getLogger("lm_eval.kvpolicy")


class AutoBatch:
    """The largest batches that were measured.

    Args:
        measure: Measures the largest batch of the first of some requests and, without requests, of prompts as long as
            the model reads.
    """

    def __init__(self, measure: Callable[..., Any]) -> None:
        """Nothing is measured."""
        self._measure = measure
        self._scored: int | None = None
        self._tokens = 0
        self._generated: int | None = None

    def to_score(self, requests: Sequence[Request], again: bool) -> int:
        """The batch size of requests that are scored, measured with the longest one.

        Args:
            requests: The requests.
            again: Whether it is measured again where they are longer than those before.
        """
        longest = max(requests, key=tokens_of)
        if self._scored is None or (again and tokens_of(longest) > self._tokens):
            self._tokens = tokens_of(longest)
            self._scored = int(self._measure([longest], 0))
        return self._scored

    def to_generate(self) -> int:
        """The batch size of prompts of any length."""
        if self._generated is None:
            log.info("batch_size=auto is measured with prompts as long as the model reads")
            self._generated = int(self._measure())
            log.info("batch_size=auto is %d", self._generated)
        return self._generated
