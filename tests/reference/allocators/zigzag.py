"""More for layers whose attention needs more tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..coding import Config
from ._measuring import Prompt, in_proportion, reaching

SMALL = "zigzag:window=6"


def measure(config: Config, prompt: Prompt) -> Any:
    """Tokens that reach a share of the mean attention, as a mean over the heads."""
    counts = [reaching(prompt.mean(head, config["window"]), config["mass"]) for head in range(len(prompt.attention))]
    return sum(counts) / len(counts)


def budgets(
    config: Config, metrics: Sequence[Any] | None, total: int, layers: int, floor: int, ceiling: int
) -> list[int]:
    """A part of an even division for each layer, the rest by how many tokens it needs."""
    assert metrics is not None
    return in_proportion(metrics, total, floor, ceiling, config["bound"])
