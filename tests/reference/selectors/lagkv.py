"""Tokens that stand out of their part of the text, as the part that follows it has it."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import stdev

from ..coding import Config
from ._common import SMALLEST, margin
from ._look import Look
from ._once import priority as priority
from ._once import waiting

DEFAULTS: Config = {"sinks": 4, "lag": 128}
SMALL = "lagkv:sinks=2:lag=4"


def rerank_every(config: Config) -> int:
    """After how many generated tokens more may be scored."""
    return config["lag"]


def scores_of_tokens(config: Config, look: Look) -> list[complex]:
    """Score all whole parts but the last, each beside the next one, by rank; a score is below 1."""
    size = max(1, min(look.budget // 4, config["lag"]))
    unscored = waiting(config, look)
    parts = [unscored[p * size : (p + 1) * size] for p in range(len(unscored) // size)]
    scores = list(look.scores)
    for part, after in pairwise(parts):
        worth = salience(look, part, after)
        for place, i in enumerate(sorted(range(size), key=lambda i: (-worth[i], i))):
            scores[part[i]] = complex((size - 1 - place) / size, 1)
    return scores


def salience(look: Look, part: list[int], after: list[int]) -> list[float]:
    """How much each token of a part stands out, in the mean of its key and its value."""
    shares: list[list[float]] = []
    doubt = 1.0  # an exponential of large numbers is as uncertain as they are large
    for vectors in (look.keys, look.values):
        scaled = [normalized(vectors[j], [vectors[i] for i in after]) for j in part]
        shares.append(softmax([stdev(x) if len(x) > 1 else 0.0 for x in scaled]))
        doubt += max(abs(x) for vector in scaled for x in vector)
    worth = [(a + b) / 2 for a, b in zip(*shares, strict=True)]
    look.report(margin(worth, [doubt if x > SMALLEST else math.inf for x in worth]))
    return worth


def normalized(vector: list[float], reference: list[list[float]]) -> list[float]:
    """A vector whose channels are stretched so that those of the reference reach from 0 to 1; 0 if it is constant."""
    found: list[float] = []
    for x, channel in zip(vector, zip(*reference, strict=True), strict=True):
        low = min(channel)
        high = max(channel)
        found.append((x - low) / (high - low) if high > low else 0.0)
    return found


def softmax(numbers: list[float]) -> list[float]:
    """Shares of 1 in proportion to the exponentials."""
    powers = [math.exp(x - max(numbers)) for x in numbers]
    return [x / sum(powers) for x in powers]
