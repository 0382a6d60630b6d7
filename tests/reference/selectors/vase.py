"""Tokens whose values have a wide range, and others that are drawn by what the last queries look at."""

from __future__ import annotations

import math

import torch

from ..coding import Config
from ._common import SMALLEST, kept_if_newest, mean_over, pool
from ._look import Look

DEFAULTS: Config = {"window": 64, "large": 0.25, "sinks": 4, "kernel": 5, "every": 64, "seed": 0}
SMALL = "vase:window=3:sinks=1:kernel=3:every=5"


def rerank_every(config: Config) -> int:
    """After how many generated tokens all are drawn again."""
    return config["every"]


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """The newest and the first stay, then what was not drawn yet; a score's imaginary part says that it was."""
    if position < min(config["sinks"], budget // 2):
        return math.inf
    worth = score.real if score.imag else 66.0 + position
    return kept_if_newest(worth, position, length, _width(config, budget))


def score_of_newest(config: Config, look: Look) -> complex:
    """Remember its queries."""
    _remember(look)
    return 0.0


def scores_of_tokens(config: Config, look: Look) -> list[complex]:
    """The largest ranges of values first, then the logarithms of a draw by attention."""
    _remember(look)
    width = _width(config, look.budget)
    past = [j for j, position in enumerate(look.positions) if position < look.length - width]
    attention = _attention(config, look, past, width)
    key = _mixed(_mixed(_mixed(config["seed"], look.layer), look.head), look.length)
    scores = [math.log(max(a, SMALLEST)) + _gumbel(key, at) for a, at in zip(attention, look.positions, strict=True)]

    def spread(j: int) -> float:
        is_sink = look.positions[j] < min(config["sinks"], look.budget // 2)
        return math.inf if is_sink else max(look.values[j]) - min(look.values[j])

    widest = sorted(past, key=lambda j: (-spread(j), j))
    ranges = [spread(j) for j in widest]
    count = int(config["large"] * look.budget + 1e-9)
    if 0 < count < len(widest) and ranges[count - 1] != ranges[count]:
        look.report(1 - ranges[count] / ranges[count - 1])
    for place, j in enumerate(widest[:count]):
        scores[j] = 65 - place / len(past)
    return [complex(score, 1) for score in scores]


def _width(config: Config, budget: int) -> int:
    return max(1, min(config["window"], budget // 2))


def _remember(look: Look) -> None:
    for hq, queries in enumerate(look.queries):
        look.memory.setdefault(hq, []).extend(query.double() for _, query in queries)


def _attention(config: Config, look: Look, past: list[int], width: int) -> list[float]:
    """What the last queries give to the tokens before them, as if there were no others."""
    if not past:
        return [0.0] * len(look.positions)
    keys = torch.tensor(look.keys, dtype=torch.float64)[past]
    of_heads = []
    for hq in range(len(look.queries)):
        rows = [torch.softmax(keys @ query * look.scale, -1).tolist() for query in look.memory[hq][-width:]]
        of_heads.append(mean_over(rows))
    mean = dict(zip(past, mean_over(of_heads), strict=True))
    return pool([mean.get(j, 0.0) for j in range(len(look.positions))], config["kernel"], "avg")


def _gumbel(key: int, number: int) -> float:
    number = _mixed(key, number)
    return -math.log(-math.log(((number >> 9) + 0.5) / 2**23))


def _mixed(key: int, number: int) -> int:
    x = (number * 0x1E3779B1 + key) % 2**32
    for _ in range(2):
        x = (x ^ (x >> 16)) * 0x45D9F3B % 2**32
    return x ^ (x >> 16)
