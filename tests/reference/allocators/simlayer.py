"""Lazy layers keep the first and the newest tokens, the others share the rest."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from ..coding import Config
from ._common import waterfill
from ._measuring import Prompt

SMALL = "simlayer:sinks=2:recent=8:threshold=0.45"


def measure(config: Config, prompt: Prompt) -> Any:
    """Attention of the last query to the first and the newest tokens, as a mean over the heads."""
    near = {token for token in range(prompt.tokens) if token < config["sinks"]}
    near |= {token for token in range(prompt.tokens) if token >= prompt.tokens - config["recent"]}
    return sum(head[-1][token] for head in prompt.attention for token in near) / len(prompt.attention)


def budgets(
    config: Config, metrics: Sequence[Any] | None, total: int, layers: int, floor: int, ceiling: int
) -> list[int]:
    """Lazy layers get what they need, if an even division allows; the others share what is left equally."""
    assert metrics is not None
    lazy = [metric > config["threshold"] for metric in metrics]
    even = Fraction(total, layers)
    if all(lazy):
        return waterfill([even] * layers, total, floor, ceiling)
    need = min(even, Fraction(config["sinks"] + config["recent"]))
    rest = (total - sum(lazy) * need) / (layers - sum(lazy))
    return waterfill([need if is_lazy else rest for is_lazy in lazy], total, floor, ceiling)
