"""A line below the log in a terminal: what the server does now."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvpolicy.serving.metrics import Metrics
from kvpolicy.text.tables import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

SPAN = 3.0
"""Seconds over which the speed is a mean, at least."""

REFRESHES = 2
"""How often the line is written in a second."""


class Status:
    """What a server does now, in one line.

    Args:
        metrics: Its counters.
        clock: Returns seconds.

    Examples:
        >>> Status(Metrics()).line()
        '0 of 0 rows, 0 waiting, 0.0 tokens/s, 0 answered, cache 0 B'
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing was seen."""
        self._metrics = metrics
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()

    def line(self) -> str:
        """The line; the speed is that since an earlier call."""
        metrics = self._metrics
        speed = self._speed(self._clock(), metrics.tokens)
        return (
            f"{metrics.running:,} of {metrics.rows:,} rows, {metrics.waiting:,} waiting, {speed:,.1f} tokens/s, "
            f"{metrics.requests['answered']:,} answered, cache {format_bytes(metrics.cache_nbytes)}"
        )

    def _speed(self, now: float, tokens: int) -> float:
        self._seen.append((now, tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= now - SPAN:
            self._seen.popleft()
        begun, before = self._seen[0]
        # An answer that ends between two reads of the counters is missing once.
        return max(tokens - before, 0) / (now - begun) if now > begun else 0.0

    def __rich__(self) -> Text:
        """The line, cut at the width of the terminal."""
        from rich.text import Text

        return Text(self.line(), style="dim", no_wrap=True, overflow="ellipsis")


@contextmanager
def show_status(metrics: Metrics, console: Console | None = None) -> Generator[None, None, None]:
    """Show the line meanwhile, and what is written to `sys.stderr` above it; nothing if that is no terminal.

    Args:
        metrics: The counters of a server.
        console: Where to show it, instead of `sys.stderr`.
    """
    if console is None and not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.live import Live

    found = console or Console(stderr=True)
    with Live(Status(metrics), console=found, refresh_per_second=REFRESHES, transient=True, redirect_stdout=False):
        yield
