"""Tokens of one head for tests of mergers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpolicy.protocols import Candidates, Merged, Tokens

KEYS = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.0, 0.9]])
VALUES = torch.tensor([[10.0, 0.0], [6.0, 2.0], [0.0, 10.0], [0.0, 8.0]])


def candidates(
    keys: Tensor,
    values: Tensor,
    kept: list[int],
    *,
    order: list[int] | None = None,
    rows: Tensor | None = None,
    priority: list[float] | None = None,
) -> Candidates:
    """Tokens [N, D] of one head, of which some are kept.

    Args:
        keys: By position.
        values: By position.
        kept: Positions.
        order: The positions of the columns; in order, unless told.
        rows: Attention of the last queries, [Hq, W, N]; one query that sees all tokens alike, unless told.
        priority: By position; the same for all, unless told.
    """
    count = len(keys)
    order = list(range(count)) if order is None else order
    place = {position: column for column, position in enumerate(order)}
    targets = torch.tensor([place[position] for position in kept])
    is_kept = torch.zeros(count, dtype=torch.bool).scatter(0, targets, True)
    positions = torch.tensor(order, dtype=torch.int32)
    everything = (keys[order], values[order], positions, is_kept, targets, torch.ones(len(kept), dtype=torch.bool))
    rows = torch.full((1, 1, count), 1 / count) if rows is None else rows
    return Candidates(
        *(t[None, None] for t in everything),
        counts=torch.zeros(1, 1, count),
        attention=rows[None, ..., order],
        length=torch.tensor([count]),
        priority=torch.tensor(priority or [0.0] * count)[None, None, order],
    )


def merged(merger: Any, given: Candidates) -> Merged:
    return merger.merge_prompt(merger.alloc(1, 1, "cpu"), given)


def held(
    keys: Tensor, positions: list[int], values: Tensor | None = None, numbers: list[float] | None = None
) -> Tokens:
    """Tokens of one head with keys [n, D], each of which stands for itself, or for some number of tokens."""
    count = len(keys)
    values = keys if values is None else values
    counts = torch.tensor([[numbers or [1.0] * count]]).log()
    there = torch.ones(1, 1, count, dtype=torch.bool)
    return Tokens(keys[None, None], values[None, None], torch.tensor([[positions]]), counts, there)
