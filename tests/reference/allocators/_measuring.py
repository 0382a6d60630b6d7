"""The attention of one layer in one prompt of one row, by loops, and what allocators count in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from torch import Tensor

from ..exact import Number, exact
from ._common import waterfill

SLACK = Fraction(1, 10**6)
"""Of a mass, what may lack where a share of it counts as reached."""


class Prompt(NamedTuple):
    """What a layer saw of a prompt of n tokens.

    Attributes:
        attention: Of each query head, query and token, [Hq][n][n]; 0 for later tokens.
        values: Of each KV head, token and channel, [H][n][D].
    """

    attention: list[list[list[float]]]
    values: list[list[list[float]]]

    @property
    def tokens(self) -> int:
        """n."""
        return len(self.attention[0])

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return len(self.attention) // len(self.values)

    def newest(self, head: int, window: int) -> list[list[float]]:
        """Attention of the newest queries of a head."""
        return self.attention[head][-window:]

    def mean(self, head: int, window: int) -> list[float]:
        """The mean of these."""
        rows = self.newest(head, window)
        return [sum(column) / len(rows) for column in zip(*rows, strict=True)]

    def before(self, window: int) -> list[int]:
        """The tokens before the newest queries."""
        return list(range(max(self.tokens - window, 0)))

    def sums(self, head: int) -> list[float]:
        """Attention of each token, summed over all queries of a head."""
        return [sum(column) for column in zip(*self.attention[head], strict=True)]


def prompt_of(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Prompt:
    """The prompt of queries [Hq, n, D], keys [H, n, D] and values [H, n, D]."""
    group = len(q) // len(k)
    attention: list[list[list[float]]] = []
    for head, queries in enumerate(q.tolist()):
        keys = k[head // group].tolist()
        rows: list[list[float]] = []
        for place, query in enumerate(queries):
            scores = [scale * sum(a * b for a, b in zip(query, key, strict=True)) for key in keys[: place + 1]]
            most = max(scores)
            weights = [math.exp(score - most) for score in scores]
            rows.append([weight / sum(weights) for weight in weights] + [0.0] * (len(keys) - place - 1))
        attention.append(rows)
    return Prompt(attention, v.tolist())


def reaching(mass: Sequence[float], share: Number) -> int:
    """How many of the largest numbers, taken one by one, reach a share of all."""
    least = exact(share) * (1 - SLACK) * sum(map(Fraction, mass))
    taken = Fraction(0)
    for count, number in enumerate(sorted(mass, reverse=True), 1):
        taken += Fraction(number)
        if taken >= least:
            return count
    return len(mass)


def in_proportion(weights: Sequence[float], total: int, floor: int, ceiling: int, bound: Number = 0) -> list[int]:
    """Whole budgets in proportion to weights, above a part of an even division; an even division of no weight."""
    layers = len(weights)
    every = sum(map(Fraction, weights))
    shares = [Fraction(weight) / every if every else Fraction(1, layers) for weight in weights]
    return waterfill([total * share for share in shares], total, floor, ceiling, exact(bound) * total / layers)


def softmax(numbers: Sequence[float]) -> list[float]:
    """Shares in proportion to exp of each number."""
    weights = [math.exp(number - max(numbers)) for number in numbers]
    return [weight / sum(weights) for weight in weights]


def pooled(line: Sequence[float], kernel: int, kind: str) -> list[float]:
    """The largest of the neighbors of each number, or their sum over the width of the kernel."""
    half = kernel // 2
    near = [line[max(place - half, 0) : place + half + 1] for place in range(len(line))]
    return [max(some) if kind == "max" else sum(some) / kernel for some in near]
