"""Tokens whose keys point away from the mean direction of all keys."""

from __future__ import annotations

import math

from ..coding import Config
from ._common import kept_if_newest
from ._look import Look

DEFAULTS: Config = {"every": 128}
SMALL = "keydiff:every=5"


def rerank_every(config: Config) -> int:
    """After how many generated tokens all are compared again."""
    return config["every"]


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """How much the key differs; the newest token stays."""
    return kept_if_newest(score.real, position, length, 1)


def scores_of_tokens(config: Config, look: Look) -> list[float]:
    """Compare every token with the sum of all unit keys."""
    units = [unit(key) for key in look.keys]
    look.memory["anchor"] = [math.fsum(column) for column in zip(*units, strict=True)]
    scores = [difference(one, look.memory["anchor"]) for one in units]
    pair = [j for j, one in enumerate(units) if any(one)]
    if len(pair) == 2:  # equal, whatever the keys are, but for rounding
        scores[pair[0]] = scores[pair[1]] = min(scores[j] for j in pair)
    return scores


def score_of_newest(config: Config, look: Look) -> complex:
    """Add the newest token to that sum, and compare it."""
    newest = unit(look.keys[-1])
    look.memory["anchor"] = [a + b for a, b in zip(look.memory["anchor"], newest, strict=True)]
    return difference(newest, look.memory["anchor"])


def unit(key: list[float]) -> list[float]:
    """A key divided by its length; zeros stay."""
    length = math.sqrt(sum(x * x for x in key))
    return [x / length for x in key] if length else key


def difference(one: list[float], anchor: list[float]) -> float:
    """Minus the cosine of a unit key and the anchor; 0 where either has no direction."""
    return -sum(a * b for a, b in zip(one, unit(anchor), strict=True))
