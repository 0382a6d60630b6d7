"""Means by the attention of the last queries, and counts."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..coding import Config, Token
from ._common import target

SMALL = "keepkv:window=5:least=-0.2"


def merge_prompt(
    config: Config,
    memory: dict[str, Any],
    tokens: list[Token],
    kept: set[int],
    targets: list[Token],
    attention: list[Tensor],
) -> float:
    """Weigh every token, find every target, then merge."""
    weights = [_weight(config, attention, column, len(tokens)) for column in range(len(tokens))]
    weight_of = {token.position: weight for token, weight in zip(tokens, weights, strict=True)}
    margin = math.inf
    members: dict[int, list[Token]] = {}
    for victim in tokens:
        if victim.position in kept:
            continue
        found, similarity, near = target({"by": "keys"}, victim, targets)
        margin = min(margin, near, abs(similarity - config["least"]))
        if found is not None and similarity >= config["least"]:
            members.setdefault(found.position, []).append(victim)
    for token in targets:
        if token.position in members:
            everyone = [token, *members[token.position]]
            _mean(everyone, [weight_of[each.position] for each in everyone])
    return margin


def merge_token(config: Config, memory: dict[str, Any], victim: Token, targets: list[Token]) -> float:
    """One token, by counts."""
    found, similarity, near = target({"by": "keys"}, victim, targets)
    if found is not None and similarity >= config["least"]:
        _mean([found, victim], [found.count, victim.count])
    return min(near, abs(similarity - config["least"]))


def _weight(config: Config, attention: list[Tensor], column: int, count: int) -> float:
    """The mean attention of a token over the queries that see it; the last n tokens are the queries' own."""
    seen: list[float] = []
    for matrix in attention:
        n = matrix.shape[0]
        for row in range(max(n - config["window"], 0), n):
            if column <= count - n + row:
                seen.append(float(matrix[row, column]))
    return sum(seen) / len(seen) + 1e-12


def _mean(everyone: list[Token], weights: list[float]) -> None:
    token = everyone[0]
    total = sum(weights)
    key = sum(weight * each.seen_key for weight, each in zip(weights, everyone, strict=True)) / total
    value = sum(weight * each.seen_value for weight, each in zip(weights, everyone, strict=True)) / total
    token.key = key.to(token.key.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    token.value = value.to(token.value.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    token.count = sum(each.count for each in everyone)
