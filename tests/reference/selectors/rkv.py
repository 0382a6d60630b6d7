"""Tokens that the last queries look at and that are not like other tokens."""

from __future__ import annotations

import math

import torch

from ..coding import Config
from ._common import kept_if_newest, pool
from ._look import Look

DEFAULTS: Config = {"window": 8, "kernel": 7, "mix": 0.07, "similar": 0.5, "every": 128}
SMALL = "rkv:window=3:kernel=3:every=5"


def rerank_every(config: Config) -> int:
    """After how many generated tokens all are ranked again."""
    return config["every"]


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """The newest stay, then what was not ranked yet; a score's imaginary part says that it was."""
    worth = score.real if score.imag else 2.0 + position
    return kept_if_newest(worth, position, length, _width(config, budget))


def score_of_newest(config: Config, look: Look) -> complex:
    """Remember its queries."""
    _remember(look)
    return 0.0


def scores_of_tokens(config: Config, look: Look) -> list[complex]:
    """Attention by the newest queries, less what a token shares with others."""
    _remember(look)
    importance = _importance(config, look)
    redundancy = _redundancy(config, look)
    mix = config["mix"]
    return [complex(mix * a - (1 - mix) * b, 1) for a, b in zip(importance, redundancy, strict=True)]


def _width(config: Config, budget: int) -> int:
    return max(1, min(config["window"], budget // 2))


def _remember(look: Look) -> None:
    for hq, queries in enumerate(look.queries):
        look.memory.setdefault(hq, []).extend(query.double() for _, query in queries)


def _importance(config: Config, look: Look) -> list[float]:
    width = _width(config, look.budget)
    past = [j for j, position in enumerate(look.positions) if position < look.length - width]
    if not past:
        return [0.0] * len(look.positions)
    keys = torch.tensor(look.keys, dtype=torch.float64)[past]
    newest = [look.memory[hq][-width:] for hq in range(len(look.queries))]
    rows = []
    for heads in zip(*newest, strict=True):
        logits = torch.stack([keys @ query * look.scale for query in heads]).amax(0)
        rows.append(torch.softmax(logits, -1))
    mean = torch.stack(rows).mean(0).tolist()
    pooled = dict(zip(past, pool(mean, config["kernel"], "max"), strict=True))
    return [pooled.get(j, 0.0) for j in range(len(look.positions))]


def _redundancy(config: Config, look: Look) -> list[float]:
    count = len(look.positions)
    cosines = [[_cosine(a, b) if i != j else 0.0 for j, b in enumerate(look.keys)] for i, a in enumerate(look.keys)]
    for row in cosines:
        alike = [j for j, cosine in enumerate(row) if cosine > config["similar"]]
        look.report(min([abs(cosine / config["similar"] - 1) for cosine in row if cosine], default=math.inf))
        if alike:
            row[alike[-1]] = 0.0
    means = [sum(row[j] for row in cosines) / count for j in range(count)]
    powers = [math.exp(mean) for mean in means]
    return [power / sum(powers) for power in powers]


def _cosine(a: list[float], b: list[float]) -> float:
    length = math.sqrt(sum(x * x for x in a) * sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / length if length else 0.0
