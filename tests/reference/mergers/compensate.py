"""One token of each head becomes the mean of everything that the head evicts."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..coding import Config, Token


def merge_prompt(
    config: Config,
    memory: dict[str, Any],
    tokens: list[Token],
    kept: set[int],
    targets: list[Token],
    attention: list[Tensor],
) -> float:
    """All evicted tokens at once; the newest token takes nothing in."""
    newest = max(token.position for token in tokens)
    victims = [token for token in tokens if token.position not in kept]
    return _take_in(memory, victims, [token for token in targets if token.position != newest])


def merge_token(config: Config, memory: dict[str, Any], victim: Token, targets: list[Token]) -> float:
    """One token."""
    return _take_in(memory, [victim], targets)


def _take_in(memory: dict[str, Any], victims: list[Token], targets: list[Token]) -> float:
    if not targets:
        return math.inf
    margin = math.inf
    host = next((token for token in targets if token.position == memory.get("host")), None)
    if host is None:
        worth = {token.position: memory["worth"][token.position] for token in targets}
        host = min(reversed(targets), key=lambda token: worth[token.position])
        others = [worth[token.position] for token in targets if token is not host]
        lowest = worth[host.position]
        gaps = [abs(x - lowest) / max(abs(x), abs(lowest)) for x in others if math.isfinite(x) and x != lowest]
        margin = min(gaps, default=math.inf)
    memory["host"] = host.position
    everyone = [host, *victims]
    count = sum(token.count for token in everyone)
    key = sum(token.count * token.seen_key for token in everyone) / count
    value = sum(token.count * token.seen_value for token in everyone) / count
    host.key = key.to(host.key.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    host.value = value.to(host.value.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    host.count = count
    return margin
