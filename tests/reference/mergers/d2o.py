"""The mean including the target, weighted by cosines, above a moving threshold."""

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
    """Find every target, move the threshold, then merge."""
    margin = math.inf
    found: list[tuple[Token, Token, float]] = []
    for victim in tokens:
        if victim.position not in kept:
            best, similarity, near = target({"by": "keys"}, victim, targets)
            margin = min(margin, near)
            if best is not None:
                found.append((victim, best, similarity))
    if not found:
        return margin
    _move(config, memory, sum(similarity for _, _, similarity in found) / len(found))
    sources: dict[int, list[tuple[Token, float]]] = {}
    for victim, best, similarity in found:
        margin = min(margin, abs(similarity - memory["threshold"]))
        if similarity >= memory["threshold"]:
            sources.setdefault(best.position, []).append((victim, similarity))
    for token in targets:
        _take_in(token, sources.get(token.position, []))
    return margin


def merge_token(config: Config, memory: dict[str, Any], victim: Token, targets: list[Token]) -> float:
    """Move the threshold, then merge the one token."""
    best, similarity, near = target({"by": "keys"}, victim, targets)
    if best is None:
        return near
    first = "threshold" not in memory
    _move(config, memory, similarity)
    # The first one is its own threshold, exactly.
    if first or similarity >= memory["threshold"]:
        _take_in(best, [(victim, similarity)])
    return near if first else min(near, abs(similarity - memory["threshold"]))


def _move(config: Config, memory: dict[str, Any], similarity: float) -> None:
    old = memory.get("threshold", similarity)
    memory["threshold"] = config["decay"] * old + (1 - config["decay"]) * similarity


def _take_in(token: Token, sources: list[tuple[Token, float]]) -> None:
    if not sources:
        return
    key = token.seen_key
    value = token.seen_value
    for victim, weight in sources:
        key = key + weight * victim.seen_key
        value = value + weight * victim.seen_value
    token.key = (key / (1 + len(sources))).to(token.key.dtype)
    token.value = (value / (1 + len(sources))).to(token.value.dtype)
