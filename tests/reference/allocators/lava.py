"""More for layers whose scores are spread over more tokens and heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..coding import Config
from ._measuring import Prompt, in_proportion, pooled

SMALL = "lava:window=6:kernel=3"


def measure(config: Config, prompt: Prompt) -> Any:
    """The entropy of the scores of all KV heads and tokens before the queries, over the largest that it can have."""
    before = prompt.before(config["window"])
    scores: list[float] = []
    for kv_head, values in enumerate(prompt.values):
        size = max(sum(abs(channel) for channel in value) for value in values)
        heads = range(kv_head * prompt.group, (kv_head + 1) * prompt.group)
        means = [prompt.mean(head, config["window"]) for head in heads]
        lines = [pooled([mean[t] for t in before], config["kernel"], "max") for mean in means]
        scores += [size * max(column) for column in zip(*lines, strict=True)]
    total = sum(scores)
    if not total or len(scores) < 2:
        return 0.0
    return -sum(score / total * math.log(score / total) for score in scores if score) / math.log(len(scores))


def budgets(
    config: Config, metrics: Sequence[Any] | None, total: int, layers: int, floor: int, ceiling: int
) -> list[int]:
    """Budgets by the entropy."""
    assert metrics is not None
    return in_proportion(metrics, total, floor, ceiling)
