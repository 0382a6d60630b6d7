"""Tokens that queries to come are expected to attend to, if they are drawn from a normal distribution."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..coding import Config, Rotation
from ._common import kept_if_newest
from ._look import Look

DEFAULTS: Config = {"sinks": 4, "horizon": 512, "epsilon": 0.0, "every": 512, "moments": "all"}
SMALL = "expected:sinks=2:horizon=6:every=7"


def smallest_budget(config: Config) -> int:
    """The sinks and one more."""
    return config["sinks"] + 1


def rerank_every(config: Config) -> int:
    """After how many generated tokens all are scored again."""
    return config["every"] if config["moments"] == "all" else 0


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """The first and the newest stay, then what was not scored yet; a score's imaginary part says that it is one."""
    if position < config["sinks"]:
        return math.inf
    return kept_if_newest(score.real if score.imag else 1024.0 + position, position, length, 1)


def score_of_newest(config: Config, look: Look) -> complex:
    """Remember its queries, if any but those of a prompt count; it is not scored yet."""
    if config["moments"] == "all":
        _remember(config, look)
    return 0.0


def scores_of_tokens(config: Config, look: Look) -> list[complex]:
    """The logarithm of the expected attention, in the mean of the query heads, times the length of the value."""
    if config["moments"] == "prompt":
        look.memory.clear()
    _remember(config, look)
    some = [j for j, position in enumerate(look.positions) if position >= config["sinks"]]
    shares = [expected_attention(config, look, hq, some) for hq in range(len(look.queries))]
    scores: list[complex] = [complex(0, 1)] * len(look.positions)
    for place, j in enumerate(some):
        mean = sum(share[place] for share in shares) / len(shares) + config["epsilon"]
        length = math.sqrt(sum(x * x for x in look.values[j]))
        scores[j] = complex(math.log(mean * length) if mean * length else -1024.0, 1)
    return scores


def _remember(config: Config, look: Look) -> None:
    """Keep all queries behind the sinks, without their rotation, in lists."""
    for hq, queries in enumerate(look.queries):
        known = look.memory.setdefault(hq, [])
        for position, query in queries:
            if position >= config["sinks"]:
                known.append(look.undo(query, position).double())


def expected_attention(config: Config, look: Look, hq: int, tokens: list[int]) -> list[float]:
    """What a query head is expected to give to each of some tokens."""
    dim = len(look.keys[0])
    known = torch.stack(look.memory[hq]) if look.memory[hq] else torch.zeros(1, dim).double()
    mean = known.mean(0)
    spread = (known - mean).T @ (known - mean) / len(known)
    turn = mean_rotation(look.apply, dim, look.length, config["horizon"])
    mean = turn @ mean
    spread = turn @ spread @ turn.T
    logits = []
    for j in tokens:
        key = torch.tensor(look.keys[j]).double()
        logits.append(float(look.scale * (mean @ key) + look.scale**2 / 2 * (key @ spread @ key)))
    most = max(logits, default=0.0)
    total = sum(math.exp(x - most) for x in logits)
    return [math.exp(x - most) / total for x in logits]


@functools.lru_cache(maxsize=64)  # all heads of a layer have the same
def mean_rotation(apply: Rotation, dim: int, start: int, horizon: int) -> Tensor:
    """The mean of the rotations at the positions to come, as a matrix for columns."""
    columns = []
    for i in range(dim):
        one = torch.zeros(dim)
        one[i] = 1
        columns.append(torch.stack([apply(one, start + ahead) for ahead in range(horizon)]).double().mean(0))
    return torch.stack(columns, 1)
