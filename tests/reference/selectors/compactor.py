"""Tokens whose keys are unlike the others, and those that the tokens around them look at."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..coding import Config
from ._common import kept_if_newest, mean_over, pool
from ._look import Look

DEFAULTS: Config = {"sinks": 8, "recent": 4, "block": 256, "sketch": 48, "blend": "auto", "regular": 0.01}
SMALL = "compactor:sinks=2:recent=2:block=8:sketch=4"
ABOVE = 1000.0
"""More than any score of a test."""


def smallest_budget(config: Config) -> int:
    """The fewest tokens with which the newest ones all stay beside the sinks that do."""
    budget = 1
    while min(config["sinks"], budget // 2) + config["recent"] > budget:
        budget += 1
    return budget


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """The first and the newest stay, then what has no score, the later the better; a score has an imaginary part."""
    if position < min(config["sinks"], budget // 2):
        return math.inf
    return kept_if_newest(score.real if score.imag else ABOVE + position, position, length, config["recent"])


def score_of_newest(config: Config, look: Look) -> complex:
    """A generated token has none."""
    return 0.0


def scores_of_tokens(config: Config, look: Look) -> list[complex]:
    """Those of the new tokens behind the sinks, by these alone; the others have what they had."""
    known = look.memory.setdefault("scores", {})
    new = [position for position, _ in look.queries[0] if position >= config["sinks"]]
    known.update(zip(new, scores_of_new(config, look, new), strict=True))
    return [complex(known[p], 1) if p in known else 0.0 for p in look.positions]


def scores_of_new(config: Config, look: Look, new: list[int]) -> list[float]:
    """Two scores of each token, in deviations from their means, and one of them weighed."""
    if not new:
        return []
    at = [look.positions.index(position) for position in new]
    keys = [torch.tensor(look.keys[j]) for j in at]
    blend = config["blend"]
    if blend == "auto":
        blend = max(0.0, 1 - look.budget / len(look.positions))
    plain = [look.undo(key, position).double() for key, position in zip(keys, new, strict=True)]
    unlike = standard(leverage(sketched(config, plain, look.layer), config["regular"]))
    looked_at = standard(attention(config, look, new, keys, [look.values[j] for j in at]))
    return [blend * x + y for x, y in zip(unlike, looked_at, strict=True)]


def sketched(config: Config, keys: list[Tensor], layer_idx: int) -> list[Tensor]:
    """Keys without their mean, as random sums of their numbers."""
    generator = torch.Generator().manual_seed(layer_idx)
    matrix = torch.randn(len(keys[0]), config["sketch"], generator=generator, dtype=torch.float64)
    mean = sum(keys, torch.zeros_like(keys[0])) / len(keys)
    return [(key - mean) @ matrix / math.sqrt(config["sketch"]) for key in keys]


def leverage(vectors: list[Tensor], regular: float) -> list[float]:
    """How much of its own direction is due to each vector."""
    squares = torch.eye(len(vectors[0]), dtype=torch.float64) * regular
    for x in vectors:
        squares = squares + torch.outer(x, x)
    inverse = torch.linalg.inv(squares)
    return [float(x @ inverse @ x) for x in vectors]


def attention(config: Config, look: Look, new: list[int], keys: list[Tensor], values: list[list[float]]) -> list[float]:
    """What each token gets from the others of its block and itself, in the mean of the query heads and neighbors."""
    every: list[list[float]] = []
    for queries in look.queries:
        got = dict.fromkeys(new, 0.0)
        for position, query in queries:
            if position < config["sinks"]:
                continue
            block = [p for p in new if _block(config, p) == _block(config, position)]
            logits = [float(query.double() @ keys[new.index(p)].double()) for p in block]
            whole = sum(math.exp(x - max(logits)) for x in logits)
            for p, x in zip(block, logits, strict=True):
                got[p] += math.exp(x - max(logits)) / whole
        every.append([got[p] for p in new])
    lengths = [math.sqrt(sum(x * x for x in value)) for value in values]
    weighed = [x * length for x, length in zip(mean_over(every), lengths, strict=True)]
    return pool(weighed, 3, "avg")


def _block(config: Config, position: int) -> int:
    """Which block a position is in."""
    return (position - config["sinks"]) // config["block"]


def standard(scores: list[float]) -> list[float]:
    """Distances from the mean, in standard deviations; 0 where all are equal but for rounding."""
    mean = sum(scores) / len(scores)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in scores) / len(scores))
    if deviation <= 1e-6 * max(abs(mean), 1.0):
        return [0.0] * len(scores)
    return [(x - mean) / deviation for x in scores]
