"""Formatting of output: text and tables that fit the terminal, help, progress of long commands, and JSON."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from typer.core import TyperGroup

from kvpolicy.text import tables

FORMAT = 1
"""The version of the JSON output. It is incremented when a field changes its meaning or is removed."""

size = tables.format_bytes
table = tables.text_table
ranges = tables.ranges


def width() -> int:
    """Return the number of columns to use: those of the terminal, or 80 without one; at least 40 and at most 120."""
    return max(40, min(shutil.get_terminal_size((80, 24)).columns, 120))


def as_json(command: str, facts: dict[str, Any]) -> str:
    """Format the results of a command as JSON, with the versions of the package and of the format.

    Args:
        command: The name of the command.
        facts: Its results, in bytes, tokens and seconds.
    """
    from kvpolicy import __version__

    head = {"kvpolicy": __version__, "format": FORMAT, "command": command}
    return json.dumps(head | facts, indent=2, allow_nan=False)


def paragraph(text: str, indent: int = 0, hang: int | None = None) -> str:
    """Wrap a text to the width of the terminal.

    Args:
        text: The text; its lines are joined first.
        indent: Spaces before the first line.
        hang: Spaces before the other lines; `indent` by default.
    """
    return textwrap.fill(
        " ".join(text.split()),
        width(),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent if hang is None else hang),
        break_long_words=False,
        break_on_hyphens=False,
    )


def terms(pairs: Sequence[tuple[str, str]], indent: int = 2) -> str:
    """Format terms and their descriptions in two columns; descriptions are wrapped within their column."""
    longest = max((len(term) for term, _ in pairs), default=0)
    column = indent + min(longest, width() // 3) + 2
    lines: list[str] = []
    for term, description in pairs:
        if indent + len(term) + 2 > column:  # a term too long for its column has a line of its own
            lines.append(" " * indent + term)
            if description:
                lines.append(paragraph(description, column))
        else:
            lines.append((" " * indent + term).ljust(column) + paragraph(description, column).lstrip())
    return "\n".join(line.rstrip() for line in lines)


def counted(number: int, noun: str) -> str:
    """Format a number with a noun in the singular or plural.

    >>> counted(1, "layer"), counted(2000, "layer")
    ('1 layer', '2,000 layers')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def input_size(batch: int, prompt: int, new: int) -> str:
    """Describe the input that a plan is made for.

    >>> input_size(1, 4096, 1024), input_size(8, 4096, 1)
    ('1 row with 4,096 prompt tokens and 1,024 new tokens', '8 rows, each with 4,096 prompt tokens and 1 new token')
    """
    rows = counted(batch, "row") + (" with" if batch == 1 else ", each with")
    return f"{rows} {counted(prompt, 'prompt token')} and {counted(new, 'new token')}"


def duration(seconds: float) -> str:
    """A time in seconds or minutes.

    >>> duration(0.2), duration(89), duration(200)
    ('1 s', '89 s', '3 min')
    """
    return f"{max(round(seconds), 1)} s" if seconds < 90 else f"{round(seconds / 60)} min"


WIDEST = 120
"""The most columns of a help, as of other output."""

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": WIDEST}
"""The settings of every group of commands."""


class Group(TyperGroup):
    """A group of commands whose summaries are wrapped in the list of commands, and not cut."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, _summary(command)) for name, command in commands if command is not None and not command.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@contextmanager
def telling_of_unfinished_work(*places: str) -> Generator[None]:
    """After Ctrl-C, say that the same command continues, if one of the places where unfinished work lies exists."""
    try:
        yield
    except KeyboardInterrupt:
        found = next((place for place in places if os.path.exists(place)), None)
        if found is not None:
            print(f"\nInterrupted. The same command continues from {found}.", file=sys.stderr, flush=True)
        raise


def _summary(command: Any) -> str:
    """The first paragraph of the help of a command."""
    return " ".join(inspect.cleandoc(command.help or "").split("\n\n")[0].split())


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
