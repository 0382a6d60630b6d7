"""Tables as text, in which layers with equal cells share one line: `print(plan)`, `print(report)` and the commands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
