"""Rows of a padded prompt that have their tokens in the same columns, and can be attended to in one call."""

from __future__ import annotations

import torch
from torch import Tensor


def rows_by_columns(valid: Tensor) -> list[tuple[slice | list[int], slice | Tensor]]:
    """Groups of rows with valid tokens in the same columns, and these columns; rows without any are left out.

    Args:
        valid: [B, P] bool.
    """
    numbers = valid.to(torch.uint8)
    count = valid.sum(-1)
    first = numbers.argmax(-1)
    stop = valid.shape[1] - numbers.flip(-1).argmax(-1)
    spans: dict[tuple[int, int], list[int]] = {}
    scattered: list[tuple[slice | list[int], slice | Tensor]] = []
    # One transfer to the host for all rows.
    for row, (size, begin, end) in enumerate(torch.stack([count, first, stop], 1).tolist()):
        if size and size == end - begin:
            spans.setdefault((begin, end), []).append(row)
        elif size:  # padding between tokens
            scattered.append((slice(row, row + 1), valid[row].nonzero().squeeze(1)))
    whole = [(_as_slice(rows), slice(*span)) for span, rows in spans.items()]
    return [*whole, *scattered]


def columns_from(columns: slice | Tensor, start: int) -> slice | Tensor:
    """The columns from `start` on, counted from `start`."""
    if isinstance(columns, slice):
        return slice(max(columns.start - start, 0), max(columns.stop - start, 0))
    return columns[columns >= start] - start


def _as_slice(rows: list[int]) -> slice | list[int]:
    """Neighboring rows as a slice, which reads them without a copy."""
    neighbors = rows[-1] - rows[0] + 1 == len(rows)
    return slice(rows[0], rows[-1] + 1) if neighbors else rows
