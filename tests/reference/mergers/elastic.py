"""The mean of a kept token and of all evicted tokens that are nearest to it."""

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
    """Every evicted token goes to the nearest position."""
    sources: dict[int, list[Token]] = {}
    for victim in tokens:
        best, _, _ = target({"by": "position"}, victim, targets)
        if victim.position not in kept and best is not None:
            sources.setdefault(best.position, []).append(victim)
    for token in targets:
        _average(token, sources.get(token.position, []))
    return math.inf


def merge_token(config: Config, memory: dict[str, Any], victim: Token, targets: list[Token]) -> float:
    """One token."""
    best, _, _ = target({"by": "position"}, victim, targets)
    if best is not None:
        _average(best, [victim])
    return math.inf


def _average(token: Token, victims: list[Token]) -> None:
    if not victims:
        return
    key = sum((victim.seen_key for victim in victims), token.seen_key) / (1 + len(victims))
    value = sum((victim.seen_value for victim in victims), token.seen_value) / (1 + len(victims))
    token.key = key.to(token.key.dtype)
    token.value = value.to(token.value.dtype)
