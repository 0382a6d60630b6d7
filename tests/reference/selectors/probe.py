"""Tokens with the highest mean attention from a few of the queries."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..coding import Config
from ._common import column_sums, kept_if_newest, mean_over

DEFAULTS: Config = {"recent": 0.05, "random": 0.05, "seed": 0}
SMALL = "probe:recent=0.2:random=0.2"


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """Attention received, over the probes that could see the token; the newest token stays."""
    return kept_if_newest(score.real / max(score.imag, 1), position, length, 1)


def probes(config: Config, count: int) -> list[int]:
    """Which of `count` new queries are probes: the newest, and some of the others by chance."""
    recent = min(math.ceil(config["recent"] * count), count)
    some = min(math.ceil(config["random"] * count), count - recent)
    chance = torch.Generator().manual_seed(config["seed"] + count)
    drawn = torch.randperm(count - recent, generator=chance).tolist()[:some]
    return sorted(drawn) + list(range(count - recent, count))


def probed(config: Config, matrix: Tensor) -> list[complex]:
    """Attention that each token got from the probes, and how many of them could see it."""
    rows = matrix.tolist()
    old = matrix.shape[1] - matrix.shape[0]
    asked = probes(config, len(rows))
    return [complex(sum(rows[i][j] for i in asked), sum(j <= old + i for i in asked)) for j in range(len(rows[0]))]


def scores_after_prefill(
    config: Config, old: Sequence[complex], attention: list[Tensor], group: list[int], budget: int
) -> Sequence[complex]:
    """Add what the probes gave."""
    heads = [probed(config, attention[hq]) for hq in group]
    return [a + sum(column) / len(group) for a, column in zip(old, zip(*heads, strict=True), strict=True)]


def scores_after_decode(
    config: Config, old: Sequence[complex], attention: list[Tensor], group: list[int]
) -> Sequence[complex]:
    """Add what the generated token gave, which is a probe."""
    seen = mean_over([column_sums(attention[hq]) for hq in group])
    return [a + b + 1j for a, b in zip(old, seen, strict=True)]


def statistic(config: Config, matrix: Tensor) -> list[float]:
    """The mean over the probes that could see the token."""
    return [x.real / max(x.imag, 1) for x in probed(config, matrix)]
