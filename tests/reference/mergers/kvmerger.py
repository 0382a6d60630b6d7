"""Runs of similar neighbors, whose evicted tokens go to the best kept one by a Gaussian of their distance."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..coding import Config, Token
from ._common import cosine

SMALL = "kvmerger:least=-0.2"


def merge_prompt(
    config: Config,
    memory: dict[str, Any],
    tokens: list[Token],
    kept: set[int],
    targets: list[Token],
    attention: list[Tensor],
) -> float:
    """Run after run."""
    margin = math.inf
    movable = {token.position for token in targets}
    runs: list[list[Token]] = []
    for token in tokens:
        similarity = cosine(runs[-1][-1].seen_key, token.seen_key) if runs else -math.inf
        margin = min(margin, abs(similarity - config["least"]))
        if similarity >= config["least"]:
            runs[-1].append(token)
        else:
            runs.append([token])
    for run in runs:
        pivots = [token for token in run if token.position in movable]
        victims = [token for token in run if token.position not in kept]
        if not pivots or not victims:
            continue
        worth = [memory["worth"][token.position] for token in pivots]
        pivot = pivots[worth.index(max(worth))]
        gaps = [
            abs(x - max(worth)) / max(abs(x), abs(max(worth)))
            for x in worth
            if x != max(worth) and math.isfinite(x) and math.isfinite(max(worth))
        ]
        margin = min([margin, *gaps])
        _merge(pivot, victims)
    return margin


def _merge(pivot: Token, victims: list[Token]) -> None:
    distances = [float((victim.seen_key - pivot.seen_key).norm()) for victim in victims]
    sigma = sum(distances) / len(distances) / math.sqrt(2)
    weights = [math.exp(-(d**2) / (2 * sigma**2)) if sigma else 1.0 for d in distances]
    key = pivot.seen_key
    value = pivot.seen_value
    for victim, weight in zip(victims, weights, strict=True):
        key = key + weight * victim.seen_key
        value = value + weight * victim.seen_value
    pivot.key = (key / (1 + sum(weights))).to(pivot.key.dtype)
    pivot.value = (value / (1 + sum(weights))).to(pivot.value.dtype)
