"""Tokens without which the output of attention would change most, by the attention that another selector knows of."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..coding import Config
from . import priorities as priorities_of
from ._common import SMALLEST, margin
from ._look import Look
from ._outputs import apart, mixed, odds, rest, shares, with_base

DEFAULTS: Config = {"base": {"name": "snapkv"}, "fast": False, "every": 128}
SMALL = "caote:every=7/h2o"


def rerank_every(config: Config) -> int:
    """After how many generated tokens all are compared with a new output."""
    return config["every"]


def scores_of_tokens(config: Config, look: Look) -> Sequence[complex]:
    """Compare all values with the output; the scores stay those of the base."""
    look = with_base(config, look)
    count = len(look.positions)
    weights = [1 / count] * count if config["fast"] else shares(config, look)
    look.memory["output"] = output = mixed(weights, look.values)
    look.memory["apart"] = {p: apart(value, output) for p, value in zip(look.positions, look.values, strict=True)}
    return look.scores


def score_of_newest(config: Config, look: Look) -> None:
    """Compare the newest value with the output that is remembered; the score is up to the base."""
    look.memory["apart"][look.positions[-1]] = apart(look.values[-1], look.memory["output"])


def priorities(config: Config, look: Look) -> list[float]:
    """How much the output would change without a token; what the base keeps stays."""
    found = list[float]()
    doubts = list[float]()
    for position, base, share in zip(
        look.positions, priorities_of(config["base"], look), shares(config, look), strict=True
    ):
        distance, size = look.memory["apart"][position]
        loss = odds(share) * distance
        found.append(math.inf if math.isinf(base) else loss)
        noise = 1 + 1 / rest(share) + size / distance if loss > SMALLEST else math.inf
        doubts.append(noise if share * size else 1.0)
    look.report(margin(found, doubts))
    return found
