"""The value becomes a mean, in which an evicted value weighs by the cosine of keys and by its share of the norms."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..coding import Config, Token
from ._common import target


def merge_prompt(
    config: Config,
    memory: dict[str, Any],
    tokens: list[Token],
    kept: set[int],
    targets: list[Token],
    attention: list[Tensor],
) -> float:
    """Find every target, then merge by the values from before."""
    margin = math.inf
    sources: dict[int, list[tuple[Token, float]]] = {}
    for victim in tokens:
        if victim.position in kept:
            continue
        best, similarity, near = target({"by": "keys"}, victim, targets)
        margin = min(margin, near, abs(similarity - config["least"]))
        if best is not None and similarity >= config["least"]:
            own = float(best.seen_value.norm())
            new = float(victim.seen_value.norm())
            weight = similarity * new / (own + new) if own + new else 0.0
            sources.setdefault(best.position, []).append((victim, weight))
    for token in targets:
        given = sources.get(token.position, [])
        if given:
            total = 1 + sum(weight for _, weight in given)
            value = token.seen_value + sum(weight * victim.seen_value for victim, weight in given)
            token.value = (value / total).to(token.value.dtype)
    return margin
