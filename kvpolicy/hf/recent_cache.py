"""The most recent cache of a model, and what runs the model within a generation without being its answer."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from kvpolicy.hf.cache import PolicyCache


class Answer:
    """What is known of a running call of `generate`.

    Attributes:
        cache: The cache of its answer; None until it begins.
        end: Columns of the answer at most, the prompt included; None if unknown.
    """

    def __init__(self) -> None:
        """Nothing has begun."""
        self.cache: PolicyCache | None = None
        self.end: int | None = None


class RecentCache:
    """The most recent cache that a model ran with: that of an answer of `generate`, or else that of a forward.

    A generation may run the model on other caches: for a negative prompt, for drafts, in a generation inside it. Those
    are not its answer's.

    Attributes:
        cache: The cache; None before the first one.
    """

    def __init__(self) -> None:
        """Nothing ran yet."""
        self.cache: PolicyCache | None = None
        self._thread = threading.local()  # several threads may run a model, each with a generation of its own

    @property
    def answer(self) -> Answer | None:
        """The outermost generation of this thread, if one runs."""
        return getattr(self._thread, "answer", None)

    @contextmanager
    def generating(self) -> Generator[Answer | None]:
        """The time of one generation; yields what is known of it, or None if it runs within another one."""
        if self.answer is not None:
            yield None
            return
        answer = self._thread.answer = Answer()
        try:
            yield answer
        finally:
            self._thread.answer = None

    def expect(self, cache: PolicyCache, end: int | None) -> None:
        """Note the cache that a generation is about to begin with, and at how many columns it ends."""
        answer = self.answer
        if answer is not None and answer.cache is None:
            answer.cache = cache
            answer.end = end

    def answers(self, cache: PolicyCache) -> bool:
        """Whether a cache is that of the answer of this thread's generation."""
        return self.answer is not None and self.answer.cache is cache

    def end_of(self, cache: PolicyCache) -> int | None:
        """Columns at which the generation on a cache ends; None if unknown."""
        answer = self.answer
        return answer.end if answer is not None and answer.cache is cache else None

    def note(self, cache: Any) -> None:
        """Note the cache of a forward that has begun."""
        answer = self.answer
        if answer is not None and answer.cache is None:
            answer.cache = cache
        if answer is None or answer.cache is cache:
            self.cache = cache
