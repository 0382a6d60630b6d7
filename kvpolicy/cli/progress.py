"""Progress of a long command: how many texts are done, and the time left."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from kvpolicy.cli.formatting import duration, width

EVERY = 30.0
"""Seconds between two lines where the output is no terminal."""

REFRESH = 0.2
"""Seconds between two updates of a line on a terminal."""


class Progress:
    """Reports several parts over the same texts: a line that is replaced on a terminal, else lines now and then.

    Args:
        parts: How many parts there are.
        stream: Where to write.
        clock: Returns seconds.
    """

    def __init__(self, parts: int, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        """Note when it began."""
        self._parts = parts
        self._stream = stream
        self._clock = clock
        self._begun = 0
        self._started = self._written = clock()
        self._is_terminal = stream.isatty()

    def part(self, name: str) -> Callable[[int, int], None]:
        """Begin the next part; returns what is called after each text with how many are done and how many there are."""
        before = self._begun
        self._begun += 1
        if self._is_terminal:
            self._replace(f"{name} ...")
        else:
            print(f"{name} ...", file=self._stream, flush=True)

        def done(texts: int, total: int) -> None:
            now = self._clock()
            is_last = texts == total
            if is_last and self._is_terminal:
                self._replace(f"{name}: {total:,} texts\n")
            if is_last or now - self._written < (REFRESH if self._is_terminal else EVERY):
                return
            self._written = now
            share = (before + texts / total) / self._parts
            left = (now - self._started) * (1 / share - 1)
            line = f"{name}: {texts:,} of {total:,} texts, about {duration(left)} left in all"
            if self._is_terminal:
                self._replace(line)
            else:
                print(line, file=self._stream, flush=True)

        return done

    def _replace(self, line: str) -> None:
        end = "\n" if line.endswith("\n") else ""
        self._stream.write("\r" + line.rstrip("\n")[: width() - 1].ljust(width() - 1) + end)
        self._stream.flush()
