"""Numbers of bytes as text, and tables as text and HTML: what every repr is made of.

These functions take plain data. What a policy, a plan or a cache shows of itself is written where that object is
defined, so that this module imports none of them. In tables, layers with equal cells share one line.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key")

MAX_ROWS = 16
"""A longer table is folded."""

Cells = tuple[str, ...]
"""The cells of one row, as HTML."""


def byte_unit(nbytes: float) -> tuple[int, str]:
    """The largest binary unit in which a number of bytes is at least 1: its size and its name.

    Examples:
        >>> byte_unit(3 * 2**20), byte_unit(12)
        ((1048576, 'MiB'), (1, 'B'))
    """
    for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 2**power:
            return 2**power, name
    return 1, "B"


def format_bytes(nbytes: int) -> str:
    """A number of bytes with three significant digits.

    Examples:
        >>> format_bytes(3 * 2**20 + 2**19), format_bytes(1000)
        ('3.5 MiB', '1,000 B')
    """
    size, unit = byte_unit(nbytes)
    value = nbytes / size
    return f"{value:,.3g} {unit}" if value < 100 else f"{value:,.0f} {unit}"


def format_share(nbytes: int, full: int) -> str:
    """`nbytes` as a percentage of `full`; empty if `full` is 0.

    Examples:
        >>> format_share(1, 4), format_share(1, 0)
        ('25.0%', '')
    """
    return f"{nbytes / full:.1%}" if full else ""


def size_summary(nbytes: int, full: int) -> str:
    """Bytes held, and their share of the full cache.

    Examples:
        >>> size_summary(2**20, 2**22)
        '1 MiB, 25.0% of the full cache'
    """
    return format_bytes(nbytes) + (f", {format_share(nbytes, full)} of the full cache" if full else "")


def count(number: int, noun: str) -> str:
    """A number and its noun, in the singular or the plural.

    Examples:
        >>> count(1, "row"), count(2, "row")
        ('1 row', '2 rows')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def shorten(text: str, width: int = 60) -> str:
    """The beginning of a long text, for messages that repeat what a user gave.

    Examples:
        >>> shorten("h2o@0.2"), len(shorten("h2o+" * 3000))
        ('h2o@0.2', 60)
    """
    return text if len(text) <= width else text[: width - 3] + "..."


def sum_by_kind(sizes: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    """The sum of several numbers of bytes by kind, or by another key such as the layer.

    Examples:
        >>> sum_by_kind([{"codes": 1}, {"codes": 2, "scales": 3}])
        {'codes': 3, 'scales': 3}
    """
    total: dict[Key, int] = {}
    for one in sizes:
        for kind, size in one.items():
            total[kind] = total.get(kind, 0) + size
    return total


def main_kinds(total: dict[str, int]) -> list[str]:
    """The kinds that take at least a hundredth of the bytes, which a table as text has columns for.

    Examples:
        >>> main_kinds({"exact": 1000, "positions": 20, "counters": 3})
        ['exact', 'positions']
    """
    return [kind for kind, size in total.items() if size and 100 * size >= sum(total.values())]


def byte_cells(sizes: dict[str, int], kinds: Sequence[str], full: int) -> Cells:
    """Cells for the bytes of each kind in `kinds`, the total of all, and its share of `full`.

    Examples:
        >>> byte_cells({"codes": 1, "scales": 1}, ["codes", "exact"], 4)
        ('1 B', '', '2 B', '50.0%')
    """
    cells = [format_bytes(sizes[kind]) if sizes.get(kind) else "" for kind in kinds]
    total = sum(sizes.values())
    return (*cells, format_bytes(total), format_share(total, full))


def resident_note(size: str) -> str:
    """The line that a report and a plan show about calibration tensors.

    Args:
        size: Their bytes, as text.
    """
    return f"calibration tensors, not counted in the cache: {size}"


def layer_table(head: Cells, rows: Iterable[tuple[int, Cells]], last: Cells) -> str:
    """A table with a line per layer, and `last` below; consecutive layers with equal cells share a line.

    Args:
        head: The titles of the columns.
        rows: The index of each layer, and its other cells.
        last: The last line.
    """
    lines: list[Cells] = []
    for cells, run in itertools.groupby(rows, key=lambda row: row[1]):
        indices = [index for index, _ in run]
        name = str(indices[0]) if len(indices) == 1 else f"{indices[0]} to {indices[-1]}"
        lines.append((name, *cells))
    if len(lines) <= MAX_ROWS:
        return table(head, [*lines, last])
    summary = f"<summary>{len(lines)} lines, layer by layer</summary>"
    return f"{table(head, [last])}<details>{summary}{table(head, lines)}</details>"


def table(head: Cells, rows: Iterable[Cells], text_columns: int = 1) -> str:
    """An HTML table: the first columns are text, aligned left, and the others numbers, aligned right."""
    columns = len(head)
    sides = ["left"] * min(text_columns, columns) + ["right"] * max(columns - text_columns, 0)
    styles = [f'style="text-align:{side}"' for side in sides]
    top = "".join(f"<th {style}>{cell}</th>" for style, cell in zip(styles, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td {style}>{cell}</td>" for style, cell in zip(styles, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def section(title: str, *parts: str) -> str:
    """A title, and HTML or lines of text below it.

    Examples:
        >>> section("title", "<b>bold</b>", "line")
        '<div><p>title</p><b>bold</b><p>line</p></div>'
    """
    return f"<div><p>{title}</p>{''.join(part if part.startswith('<') else f'<p>{part}</p>' for part in parts)}</div>"


MAX_LINES = 16
"""A longer table of layers is shown without its middle."""


def text_table(rows: Sequence[Sequence[str]], left: int = 1, indent: int = 0) -> str:
    """Format rows with aligned columns that are separated by two spaces.

    Args:
        rows: The cells; the first row is the header.
        left: The number of columns, from the first, that are aligned to the left. The others hold numbers.
        indent: Spaces before each line.

    Examples:
        >>> print(text_table([("layer", "bytes"), ("0", "12"), ("1-31", "9")]))
        layer  bytes
        0         12
        1-31       9
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        cells = [
            cell.ljust(size) if column < left else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def text_layer_table(
    head: Sequence[str],
    rows: Iterable[tuple[int, Sequence[str]]],
    last: Sequence[str] | None = None,
    nbytes: Mapping[int, int] | None = None,
) -> str:
    """Format a table of layers; layers with equal cells share a line, and a long table is shown without its middle.

    Layers are compared as they are shown. The first one of a cache also holds a few bytes for all, so that its sums
    may differ in the last digit: with `nbytes`, sums that differ by less than a hundredth are equal, and a line shows
    those of its first layer.

    Args:
        head: The titles of the columns, that of the layers first.
        rows: The index of each layer, and its other cells.
        last: A line below, such as that of all layers.
        nbytes: The bytes of each layer, by its index; the last two cells are then these and their fraction.

    Examples:
        >>> print(text_layer_table(("layers", "tokens"), [(0, ("8",)), (1, ("4",)), (2, ("8",))]))
        layers  tokens
        0, 2         8
        1            4
        >>> sizes = {0: 1004, 1: 1000, 2: 500}
        >>> rows = [(index, ("8", f"{size:,} B", "")) for index, size in sizes.items()]
        >>> print(text_layer_table(("layers", "tokens", "bytes", ""), rows, nbytes=sizes))
        layers  tokens    bytes
        0-1          8  1,004 B
        2            8    500 B
    """
    groups: list[tuple[list[int], Sequence[str]]] = []
    for index, cells in rows:
        group = next((indices for indices, first in groups if _equal(index, cells, indices[0], first, nbytes)), None)
        if group is None:
            groups.append(([index], cells))
        else:
            group.append(index)
    lines = [(ranges(indices), *cells) for indices, cells in groups]
    if len(lines) > MAX_LINES:
        half = MAX_LINES // 2
        lines[half:-half] = [(f"{len(lines) - 2 * half} more", *[""] * (len(head) - 1))]
    return text_table([head, *lines, *([] if last is None else [last])])


def _equal(
    index: int, cells: Sequence[str], other: int, others: Sequence[str], nbytes: Mapping[int, int] | None
) -> bool:
    if nbytes is None:
        return tuple(cells) == tuple(others)
    close = 100 * abs(nbytes[index] - nbytes[other]) <= nbytes[other]
    return close and tuple(cells[:-2]) == tuple(others[:-2])


def ranges(numbers: Sequence[int], most: int | None = 3) -> str:
    """Format ascending numbers as ranges.

    Args:
        numbers: The numbers, such as indices of layers.
        most: If there are more ranges than this, only the count, the first and the last number are shown.

    Examples:
        >>> ranges([0, 1, 2, 5]), ranges([3]), ranges([1, 3, 5, 7])
        ('0-2, 5', '3', '4 of 1-7')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    if most is not None and len(runs) > most:
        return f"{len(numbers)} of {numbers[0]}-{numbers[-1]}"
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
