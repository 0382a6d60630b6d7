"""Formatting of output: text and tables that fit the terminal, and JSON."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from kvpolicy.text import tables, text_tables

FORMAT = 1
"""The version of the JSON output. It is incremented when a field changes its meaning or is removed."""

size = tables.format_bytes
table = text_tables.text_table
ranges = text_tables.ranges


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
