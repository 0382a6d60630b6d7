"""The counted law: values become the mean over all tokens that a slot stands for; keys of the targets stay."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..coding import Config, Token
from ._common import target

SMALL = "merge:least=-0.2"


def merge_prompt(
    config: Config,
    memory: dict[str, Any],
    tokens: list[Token],
    kept: set[int],
    targets: list[Token],
    attention: list[Tensor],
) -> float:
    """Every evicted token, one after the other."""
    margin = math.inf
    members: dict[int, list[Token]] = {}
    for victim in tokens:
        if victim.position in kept:
            continue
        found, similarity, near = target(config, victim, targets)
        margin = min(margin, near, abs(similarity - config["least"]))
        if found is not None and similarity >= config["least"]:
            members.setdefault(found.position, []).append(victim)
    for token in targets:
        _take_in(token, members.get(token.position, []))
    return margin


def merge_token(config: Config, memory: dict[str, Any], victim: Token, targets: list[Token]) -> float:
    """One token."""
    found, similarity, near = target(config, victim, targets)
    if found is not None and similarity >= config["least"]:
        _take_in(found, [victim])
    return min(near, abs(similarity - config["least"]))


def _take_in(token: Token, victims: list[Token]) -> None:
    """The mean value of a token and of its victims, each as often as it counts."""
    if not victims:
        return
    everyone = [token, *victims]
    count = sum(each.count for each in everyone)
    mean = sum(each.count * each.seen_value for each in everyone) / count
    token.value = mean.to(token.value.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    token.count = count
