"""The first tokens and the newest ones."""

from __future__ import annotations

import math

from ..coding import Config

DEFAULTS: Config = {"sinks": 4}
SMALL = "streaming:sinks=2"


def smallest_budget(config: Config) -> int:
    """The first tokens, and the current one."""
    return config["sinks"] + 1


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """The first tokens stay; later ones are worth more."""
    return math.inf if position < config["sinks"] else float(position)
