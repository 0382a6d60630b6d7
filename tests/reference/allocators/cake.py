"""More for layers whose attention is spread out and shifts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..coding import Config
from ._measuring import Prompt, in_proportion, softmax

SMALL = "cake:window=6:entropy=1.5:variance=0.5"


def measure(config: Config, prompt: Prompt) -> Any:
    """The logarithm of entropy times variance, each to a power, over the tokens before the newest queries."""
    window = config["window"]
    entropy = variance = 0.0
    for head in range(len(prompt.attention)):
        rows = prompt.newest(head, window)
        for token in prompt.before(window):
            column = [row[token] for row in rows]
            entropy += sum(-weight * math.log(weight + 1e-10) for weight in column)
            mean = sum(column) / len(column)
            if len(column) > 1:
                variance += sum((weight - mean) ** 2 for weight in column) / (len(column) - 1)
    entropy = max(entropy, 1e-6)
    variance = max(variance, 1e-12)
    return math.log(entropy) / config["entropy"] + math.log(variance) / config["variance"]


def budgets(
    config: Config, metrics: Sequence[Any] | None, total: int, layers: int, floor: int, ceiling: int
) -> list[int]:
    """Budgets by the preference, of which the logarithm is given."""
    assert metrics is not None
    return in_proportion(softmax(metrics), total, floor, ceiling)
