"""How the commands print: plain aligned text as wide as the terminal, or JSON."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

FORMAT = 1
"""The version of the commands' JSON: it grows when a field changes its meaning or goes."""


def width() -> int:
    """Columns to write in: the terminal's, or 80 where there is none; 40 at least and 120 at most."""
    return max(40, min(shutil.get_terminal_size((80, 24)).columns, 120))


def as_json(command: str, facts: dict[str, Any]) -> str:
    """Facts as JSON, with the versions that a reader of them needs.

    Args:
        command: The command's name.
        facts: What it found; numbers in bytes, tokens and seconds.
    """
    from kvpolicy import __version__

    head = {"kvpolicy": __version__, "format": FORMAT, "command": command}
    return json.dumps(head | facts, indent=2, allow_nan=False)


def paragraph(text: str, indent: int = 0, hang: int | None = None) -> str:
    """Text wrapped to the terminal.

    Args:
        text: In one or more lines; they are joined.
        indent: Columns before the first line.
        hang: Columns before the others; by default as many.
    """
    rest = " " * (indent if hang is None else hang)
    return textwrap.fill(
        " ".join(text.split()), width(), initial_indent=" " * indent, subsequent_indent=rest,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def terms(pairs: Sequence[tuple[str, str]], indent: int = 2) -> str:
    """Words and what they mean in two columns; a meaning too long for its line goes on below itself."""
    wide = max((len(word) for word, _ in pairs), default=0)
    column = indent + min(wide, width() // 3) + 2
    lines: list[str] = []
    for word, meaning in pairs:
        if indent + len(word) + 2 > column:  # a long word has its line for itself
            lines += [" " * indent + word, paragraph(meaning, column)] if meaning else [" " * indent + word]
            continue
        lines.append((" " * indent + word).ljust(column) + paragraph(meaning, column).lstrip())
    return "\n".join(line.rstrip() for line in lines)


def table(rows: Sequence[Sequence[str]], left: int = 1, indent: int = 0) -> str:
    """Rows with aligned columns, two blanks between, the first row a head.

    Args:
        rows: Cells.
        left: How many columns, from the first, are aligned to the left; the others are numbers.
        indent: Columns before each line.

    >>> print(table([("layer", "bytes"), ("0", "12"), ("1-31", "9")]))
    layer  bytes
    0         12
    1-31       9
    """
    wide = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        pairs = enumerate(zip(row, wide, strict=True))
        cells = [cell.ljust(size) if at < left else cell.rjust(size) for at, (cell, size) in pairs]
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def counted(number: int, thing: str) -> str:
    """A number of things.

    >>> counted(1, "layer"), counted(2000, "layer")
    ('1 layer', '2,000 layers')
    """
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def size(nbytes: int) -> str:
    """Write bytes in the decimal unit that fits.

    >>> size(141_107_412_992), size(84_000), size(12)
    ('141.11 GB', '84.00 KB', '12 B')
    """
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:,.2f} {unit}"
    return f"{nbytes} B"
