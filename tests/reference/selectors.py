"""Which tokens are kept: the score and the priority of a single token, method by method.

`attention[hq]` is the full matrix of query head hq, [n new queries, N tokens on offer], rows and columns in
ascending order of position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .exact import ceil_share

Config = dict[str, Any]

DEFAULTS: dict[str, Config] = {
    "window": {},
    "streaming": {"sinks": 4},
    "h2o": {"recent": 0.5},
    "snapkv": {"window": 32, "kernel": 7, "pool": "avg"},
    "tova": {},
    "probe": {"recent": 0.05, "random": 0.05, "seed": 0},
    "kvcrush": {
        "base": {"name": "snapkv"},
        "split": 0.25,
        "anchor": "random",
        "seed": 0,
        "quantile": 0.5,
        "pick": "first",
        "buckets": "rank",
        "page": 0,
    },
}


def complete(config: str | Config) -> Config:
    """Fill in the defaults of a selector: `"h2o"` or `{"name": "h2o", "recent": 0.25}`."""
    given = {"name": config} if isinstance(config, str) else dict(config)
    known = DEFAULTS[given["name"]]
    unknown = set(given) - set(known) - {"name"}
    if unknown:
        raise ValueError(f"{given['name']} has no {sorted(unknown)}; it has {sorted(known)}.")
    full = {**known, **given}
    if "base" in full:
        full["base"] = complete(full["base"])
    return full


def smallest_budget(config: Config) -> int:
    """The fewest tokens that a selector (not a refiner) can work with."""
    return config["sinks"] + 1 if config["name"] == "streaming" else 1


def observation_window(config: Config, budget: int) -> int:
    """How many of the newest queries a score or a refiner's statistic sums over."""
    if config["name"] == "snapkv":
        return max(1, min(config["window"], budget // 2))
    return 1 if config["name"] == "tova" else 32


def protected(config: Config, budget: int) -> int:
    """How many of the newest tokens are always kept."""
    if config["name"] == "h2o":
        return max(1, ceil_share(config["recent"], budget))
    if config["name"] == "probe":
        return 1
    if config["name"] in ("snapkv", "tova"):
        return observation_window(config, budget)
    return 0


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """What one token is worth when `length` tokens have been seen.

    A score is a number; a probe's is two, the attention that a token got and from how many probes, as a complex one.
    """
    if config["name"] == "window":
        return float(position)
    if config["name"] == "streaming":
        return math.inf if position < config["sinks"] else float(position)
    worth = score.real / max(score.imag, 1) if config["name"] == "probe" else score.real
    return math.inf if position >= length - protected(config, budget) else worth


def probes(config: Config, count: int) -> list[int]:
    """Which of `count` new queries are probes: the newest, and some of the others by chance."""
    recent = min(math.ceil(config["recent"] * count), count)
    some = min(math.ceil(config["random"] * count), count - recent)
    chance = torch.Generator().manual_seed(config["seed"] + count)
    drawn = torch.randperm(count - recent, generator=chance).tolist()[:some]
    return sorted(drawn) + list(range(count - recent, count))


def probed(config: Config, matrix: Tensor) -> list[complex]:
    """Attention that each token got from the probes, and how many of them could see it."""
    rows, old = matrix.tolist(), matrix.shape[1] - matrix.shape[0]
    asked = probes(config, len(rows))
    return [complex(sum(rows[i][j] for i in asked), sum(j <= old + i for i in asked)) for j in range(len(rows[0]))]


def pool(scores: list[float], kernel: int, how: str) -> list[float]:
    """Pool along the tokens; what lies beyond the ends counts as zero."""
    half = kernel // 2
    pooled = []
    for j in range(len(scores)):
        near = [scores[i] if 0 <= i < len(scores) else 0.0 for i in range(j - half, j + half + 1)]
        pooled.append(sum(near) / kernel if how == "avg" else max(near))
    return pooled


def column_sums(matrix: Tensor, queries: int | None = None) -> list[float]:
    """Attention that each token received from all queries, or from the newest few."""
    rows = matrix.tolist()
    rows = rows if queries is None else rows[-queries:]
    return [sum(row[j] for row in rows) for j in range(len(rows[0]))]


def mean_over(lists: list[list[float]]) -> list[float]:
    """Elementwise mean of lists of equal length."""
    return [sum(column) / len(lists) for column in zip(*lists, strict=True)]


def scores_after_prefill(
    config: Config, old: Sequence[complex], attention: list[Tensor], group: list[int], budget: int
) -> Sequence[complex]:
    """The scores of one KV head's tokens after a prefill or chunk.

    Args:
        config: A selector (not a refiner).
        old: Score of each token on offer before, zero for the new ones.
        attention: Matrix of every query head of the layer.
        group: Which query heads read this KV head.
        budget: Tokens the selector may keep.
    """
    name = config["name"]
    if name == "h2o":
        seen = mean_over([column_sums(attention[hq]) for hq in group])
        return [a + b for a, b in zip(old, seen, strict=True)]
    if name == "snapkv":
        window = observation_window(config, budget)
        seen = mean_over([column_sums(attention[hq], window) for hq in group])
        return pool(seen, config["kernel"], config["pool"])
    if name == "tova":
        return mean_over([column_sums(matrix, 1) for matrix in attention])
    if name == "probe":
        heads = [probed(config, attention[hq]) for hq in group]
        return [a + sum(column) / len(group) for a, column in zip(old, zip(*heads, strict=True), strict=True)]
    return old


def scores_after_decode(
    config: Config, old: Sequence[complex], attention: list[Tensor], group: list[int]
) -> Sequence[complex]:
    """The scores of one KV head's tokens after one generated token, itself included as the last."""
    if config["name"] in ("h2o", "probe"):
        seen = mean_over([column_sums(attention[hq]) for hq in group])
        one = 1j if config["name"] == "probe" else 0  # a generated token is a probe
        return [a + b + one for a, b in zip(old, seen, strict=True)]
    if config["name"] == "tova":
        return mean_over([column_sums(matrix) for matrix in attention])
    return old


def statistic(config: Config, matrix: Tensor, budget: int) -> list[float]:
    """One query head's own score of each token, before any pooling, for a refiner."""
    if config["name"] == "h2o":
        return column_sums(matrix)
    if config["name"] == "probe":
        return [x.real / max(x.imag, 1) for x in probed(config, matrix)]
    return column_sums(matrix, observation_window(config, budget))


def top(priorities: list[float], count: int) -> list[int]:
    """Indices of the `count` highest priorities, ties to the earlier token, ascending."""
    order = sorted(range(len(priorities)), key=lambda j: (-priorities[j], j))
    return sorted(j for j in order[: max(count, 0)] if priorities[j] > -math.inf)


def evicted(priorities: list[float]) -> int:
    """Index of the token that leaves: the lowest priority, ties to the later token."""
    return min(range(len(priorities)), key=lambda j: (priorities[j], -j))


def margin(worth: list[float]) -> float:
    """The smallest relative gap between two numbers that differ: below fp32's noise, a choice is anyone's guess."""
    distinct = sorted({x for x in worth if math.isfinite(x)})
    return min([(b - a) / max(abs(a), abs(b)) for a, b in pairwise(distinct)], default=math.inf)
