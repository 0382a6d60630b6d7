"""A few slots of each head are the means of what it evicts, and are counted."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..coding import Config, Token

SMALL = "zsmerge:slots=2"


def merge_prompt(
    config: Config,
    memory: dict[str, Any],
    tokens: list[Token],
    kept: set[int],
    targets: list[Token],
    attention: list[Tensor],
) -> float:
    """Groups of neighbors, one for each residual slot; the newest token takes nothing in."""
    newest = max(token.position for token in tokens)
    targets = [token for token in targets if token.position != newest]
    victims = [token for token in tokens if token.position not in kept]
    if not targets:
        return math.inf
    margin = math.inf
    hosts = [token for token in targets if token.position in memory.get("hosts", [])]
    while len(hosts) < min(config["slots"], len(targets)):
        host, near = _lowest(memory, [token for token in targets if token not in hosts])
        hosts.append(host)
        margin = min(margin, near)
    hosts.sort(key=lambda token: token.position)
    memory["hosts"] = [token.position for token in hosts]
    groups: list[list[Token]] = [[] for _ in hosts]
    for rank, victim in enumerate(victims):
        groups[rank * len(hosts) // len(victims)].append(victim)
    for host, group in zip(hosts, groups, strict=True):
        _take_in(config, host, group)
    return margin


def merge_token(config: Config, memory: dict[str, Any], victim: Token, targets: list[Token]) -> float:
    """To a new residual slot if one is missing, else to that of the largest product."""
    hosts = [token for token in targets if token.position in memory.get("hosts", [])]
    others = [token for token in targets if token not in hosts]
    if len(hosts) < config["slots"] and others:
        host, margin = _lowest(memory, others)
        memory["hosts"] = [token.position for token in [*hosts, host]]
    elif hosts:
        products = [float(token.seen_key @ victim.seen_key) for token in hosts]
        host = hosts[products.index(max(products))]
        margin = min(
            (max(products) - x for token, x in zip(hosts, products, strict=True) if token is not host), default=math.inf
        )
    else:
        return math.inf
    _take_in(config, host, [victim])
    return margin


def _lowest(memory: dict[str, Any], tokens: list[Token]) -> tuple[Token, float]:
    """The token of lowest priority, of ties the latest, and how near another one is."""
    worth = {token.position: memory["worth"][token.position] for token in tokens}
    host = min(reversed(tokens), key=lambda token: worth[token.position])
    lowest = worth[host.position]
    others = [worth[token.position] for token in tokens if token is not host]
    gaps = [abs(x - lowest) / max(abs(x), abs(lowest)) for x in others if math.isfinite(x) and x != lowest]
    return host, min(gaps, default=math.inf)


def _take_in(config: Config, host: Token, victims: list[Token]) -> None:
    if not victims:
        return
    everyone = [host, *victims]
    # What a token counts in attention is the number of tokens to the power of alpha.
    numbers = [token.count ** (1 / config["alpha"]) for token in everyone]
    key = sum(n * token.seen_key for n, token in zip(numbers, everyone, strict=True)) / sum(numbers)
    value = sum(n * token.seen_value for n, token in zip(numbers, everyone, strict=True)) / sum(numbers)
    host.key = key.to(host.key.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    host.value = value.to(host.value.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    host.count = sum(numbers) ** config["alpha"]
