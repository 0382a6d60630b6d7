"""What selectors have in common that score every token once, some time after it came.

The imaginary part of a score says that it is one.
"""

from __future__ import annotations

import math

from ..coding import Config
from ._common import kept_if_newest
from ._look import Look

UNSCORED = 1.0
"""Above every score."""


def sinks(config: Config, budget: int) -> int:
    """How many of the first tokens always stay, and are not scored."""
    return min(config["sinks"], budget // 2)


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """The first and the newest stay, then what was not scored yet, later tokens first, then the others by score."""
    if position < sinks(config, budget):
        return math.inf
    return kept_if_newest(score.real if score.imag else UNSCORED + position, position, length, 1)


def waiting(config: Config, look: Look) -> list[int]:
    """Indices of the tokens that have no score yet."""
    first = sinks(config, look.budget)
    pairs = zip(look.positions, look.scores, strict=True)
    return [j for j, (position, score) in enumerate(pairs) if position >= first and not score.imag]
