"""More for layers that need more tokens to reach a share of their accumulated attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..coding import Config
from ._measuring import Prompt, in_proportion, reaching

SMALL = "mass"


def measure(config: Config, prompt: Prompt) -> Any:
    """Tokens that reach a share of the attention of all heads and queries."""
    sums = [prompt.sums(head) for head in range(len(prompt.attention))]
    return reaching([sum(column) / len(column) for column in zip(*sums, strict=True)], config["share"])


def budgets(
    config: Config, metrics: Sequence[Any] | None, total: int, layers: int, floor: int, ceiling: int
) -> list[int]:
    """Budgets by the number of tokens."""
    assert metrics is not None
    return in_proportion(metrics, total, floor, ceiling)
