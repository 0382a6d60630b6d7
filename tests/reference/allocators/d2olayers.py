"""More for layers in which few heads concentrate their attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..coding import Config
from ._measuring import Prompt, in_proportion, softmax

SMALL = "d2olayers"


def measure(config: Config, prompt: Prompt) -> Any:
    """The variance of the sums of each head, scaled among the heads to [0, 1], as a mean over them."""
    found: list[float] = []
    for head in range(len(prompt.attention)):
        sums = prompt.sums(head)
        mean = sum(sums) / len(sums)
        found.append(sum((number - mean) ** 2 for number in sums) / max(len(sums) - 1, 1))
    low = min(found)
    high = max(found)
    return sum((number - low) / (high - low + 1e-6) for number in found) / len(found)


def budgets(
    config: Config, metrics: Sequence[Any] | None, total: int, layers: int, floor: int, ceiling: int
) -> list[int]:
    """Budgets by a softmax of the negative metrics."""
    assert metrics is not None
    return in_proportion(softmax([-metric for metric in metrics]), total, floor, ceiling)
