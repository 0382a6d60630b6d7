"""The target of a token: scalar by scalar."""

from __future__ import annotations

import math

from torch import Tensor

from ..coding import Config, Token


def cosine(x: Tensor, y: Tensor) -> float:
    """The cosine of two vectors; 0 if one is zero."""
    pairs = list(zip(x.tolist(), y.tolist(), strict=True))
    norms = math.sqrt(sum(a * a for a, _ in pairs)) * math.sqrt(sum(b * b for _, b in pairs))
    return sum(a * b for a, b in pairs) / norms if norms else 0.0


def target(config: Config, victim: Token, targets: list[Token]) -> tuple[Token | None, float, float]:
    """Where a token goes, the cosine of the two keys, and how near another target was; None without targets."""
    best: Token | None = None
    highest = -math.inf
    second = -math.inf
    for token in targets:  # ascending by position, so that the earlier one wins a tie
        if config["by"] == "keys":
            rank = cosine(victim.seen_key, token.seen_key)
        else:
            rank = -float(abs(victim.position - token.position))
        if rank > highest:
            second = highest
            highest = rank
            best = token
        else:
            second = max(second, rank)
    if best is None:
        return None, -math.inf, math.inf
    return best, cosine(victim.seen_key, best.seen_key), highest - second
