"""As much for each layer as it has of the tokens that all layers attend to most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..coding import Config
from ._measuring import Prompt, in_proportion, pooled

SMALL = "dynamickv:window=6:kernel=3"


def measure(config: Config, prompt: Prompt) -> Any:
    """The pooled attention of each KV head to the tokens before the newest queries, [H][n]; None for others."""
    before = prompt.before(config["window"])
    found: list[list[float | None]] = []
    for kv_head in range(len(prompt.values)):
        heads = range(kv_head * prompt.group, (kv_head + 1) * prompt.group)
        lines = [
            pooled([prompt.mean(head, config["window"])[t] for t in before], config["kernel"], "mean") for head in heads
        ]
        line = [sum(column) / len(column) for column in zip(*lines, strict=True)]
        found.append([*line, *[None] * (prompt.tokens - len(line))])
    return found


def budgets(
    config: Config, metrics: Sequence[Any] | None, total: int, layers: int, floor: int, ceiling: int
) -> list[int]:
    """Take the best tokens of all heads and layers one by one, of equal ones those of the earlier layer.

    `metrics` has what the tokens of each head of each layer are worth, or a number of each layer.
    """
    assert metrics is not None
    if not isinstance(metrics[0], list):
        return in_proportion(metrics, total, floor, ceiling)
    worth = [(-w, layer) for layer, heads in enumerate(metrics) for head in heads for w in head if w is not None]
    taken = [layer for _, layer in sorted(worth)[: total * len(metrics[0])]]
    return in_proportion([taken.count(layer) for layer in range(layers)], total, floor, ceiling)
