"""The smallest loss of a multiple-choice knapsack, by dynamic programming over every cost."""

from __future__ import annotations

from collections.abc import Sequence


def least_loss(items: Sequence[Sequence[tuple[int, float]]], limit: int) -> float | None:
    """The least sum of losses of one (cost, loss) of each item with costs up to `limit` in all; None if none fits."""
    best: list[float | None] = [0.0] * (limit + 1)
    for options in items:
        after: list[float | None] = [None] * (limit + 1)
        for cost, loss in options:
            for total in range(cost, limit + 1):
                before = best[total - cost]
                if before is not None and (after[total] is None or before + loss < after[total]):  # pyright: ignore
                    after[total] = before + loss
        best = after
    return best[limit]
