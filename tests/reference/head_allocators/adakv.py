"""AdaKV: a safe part of every head, then all tokens of the layer compete."""

from __future__ import annotations

from ..coding import Config
from ..exact import floor_share


def wishes(config: Config, worths: list[list[float]], total: int) -> list[int]:
    """How many of each head's tokens are among the `total` best."""
    heads = len(worths)
    safe = floor_share(config.get("safeguard", 0.2), total) // heads
    won = [0] * heads
    rest: list[tuple[float, int, int]] = []
    for head, worth in enumerate(worths):
        best = sorted(range(len(worth)), key=lambda j: (-worth[j], j))
        won[head] = len(best[:safe])
        rest += [(-worth[j], head, j) for j in best[safe:]]
    for _, head, _ in sorted(rest)[: total - sum(won)]:
        won[head] += 1
    return won
