"""Tokens that may become important: the most that any of the last queries looks at them, and what they add then."""

from __future__ import annotations

from ..coding import Config
from ._common import kept_if_newest, margin, mean_over, pool
from ._look import Look
from ._outputs import projected_lengths

DEFAULTS: Config = {"window": 32, "kernel": 5, "mass": 0.9}
SMALL = "defensive:window=6:kernel=3"


def observation_window(config: Config, budget: int) -> int:
    """The last queries, at most as many as half of the budget."""
    return max(1, min(config["window"], budget // 2))


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """The score; the window itself stays."""
    return kept_if_newest(score.real, position, length, observation_window(config, budget))


def scores_of_layer(config: Config, looks: list[Look]) -> list[list[float]]:
    """Score the tokens of every KV head; what a token adds counts beside what it adds by the other KV heads."""
    lengths = [dict(zip(look.positions, projected_lengths(look), strict=True)) for look in looks]
    found: list[list[float]] = []
    for look, own in zip(looks, lengths, strict=True):
        totals = [sum(other.get(position, 0.0) for other in lengths) for position in look.positions]
        shares = [own[p] / total if total else 0.0 for p, total in zip(look.positions, totals, strict=True)]
        found.append(scores_of_head(config, look, shares))
    return found


def scores_of_head(config: Config, look: Look, shares: list[float]) -> list[float]:
    """Score the tokens of a KV head, given its share of what each adds; the window's tokens have a score of 0."""
    assert look.attention is not None
    window = observation_window(config, look.budget)
    past = sum(position < look.length - window for position in look.positions)
    scores = [0.0] * len(look.positions)
    if not past:
        return scores
    rows = [row[:past] for matrix in look.attention for row in matrix.tolist()[-window:]]
    most = [max(column) for column in zip(*(pooled(row, config["kernel"]) for row in rows), strict=True)]
    mean = mean_over(rows)
    first = leading(mean, config["mass"], max(look.budget - window, 0), look)
    for j in range(past):
        defended = max(most[j], sum(most) / past) * shares[j]
        scores[j] = 1 + mean[j] if j in first else defended
    return scores


def pooled(row: list[float], kernel: int) -> list[float]:
    """A query's attention over the past, spread to neighbors, with the same sum."""
    spread = pool(row, kernel, "avg")
    return [x * sum(row) / sum(spread) if sum(spread) else 0.0 for x in spread]


def leading(mean: list[float], mass: float, count: int, look: Look) -> set[int]:
    """The tokens with the highest mean attention, until they have a share of it together, at most so many."""
    limit = mass * sum(mean)
    before = 0.0
    first = set[int]()
    for j in sorted(range(len(mean)), key=lambda j: (-mean[j], j))[:count]:
        if limit:
            look.report(abs(before - limit) / limit)
        if before >= limit:
            break
        first.add(j)
        before += mean[j]
    look.report(margin(mean))
    return first
