"""Tokens with short keys."""

from __future__ import annotations

import math

from ..coding import Config
from ._common import kept_if_newest
from ._look import Look

DEFAULTS: Config = {}


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """Minus the length of the key; the newest token stays."""
    return kept_if_newest(score.real, position, length, 1)


def scores_of_tokens(config: Config, look: Look) -> list[complex]:
    """Measure all keys, as attention reads them."""
    return [measured(key) for key in look.keys]


def score_of_newest(config: Config, look: Look) -> complex:
    """Measure the newest key."""
    return measured(look.keys[-1])


def measured(key: list[float]) -> complex:
    """The score of a key."""
    return complex(-math.sqrt(sum(x * x for x in key)), 1)
