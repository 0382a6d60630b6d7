"""The newest tokens."""

from __future__ import annotations

from ..coding import Config

DEFAULTS: Config = {}


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """Later tokens are worth more."""
    return float(position)
