"""One progress bar for requests that are answered in several groups."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm


class CountedAnswers:
    """A hook of lm-eval's request cache that moves a progress bar: each answer is told to it as it comes.

    Args:
        hook: The hook that the answers are for.
        bar: The progress bar.
    """

    def __init__(self, hook: Any, bar: Any) -> None:
        """Nothing was answered."""
        self._hook = hook
        self._bar = bar

    def add_partial(self, *told: Any) -> None:
        """Pass an answer on, and count it."""
        self._hook.add_partial(*told)
        self._bar.update(1)


@contextmanager
def one_bar(lm: Any, title: str, requests: int, hidden: bool) -> Generator[None]:
    """Show one bar meanwhile, which counts the answers of a model of lm-eval.

    Args:
        lm: The model, which tells each answer to its `cache_hook`.
        title: What stands before the bar.
        requests: How many answers there will be.
        hidden: Whether nothing is shown.
    """
    hook = lm.cache_hook
    with tqdm(total=requests, disable=hidden, desc=title) as bar:
        lm.cache_hook = CountedAnswers(hook, bar)
        try:
            yield
        finally:
            lm.cache_hook = hook
