"""Tokens that were looked at most when the looks are disturbed: Gumbel noise on every score, then a temperature."""

from __future__ import annotations

import math

from ..coding import Config
from ._common import kept_if_newest, mean_over
from ._look import Look

DEFAULTS: Config = {"recent": 0.3, "tau_init": 1.0, "tau_end": 2.0, "steps": 100, "seed": 0}
SMALL = "keyformer:steps=5"


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """What a token has been given; the newest stay."""
    return kept_if_newest(score.real, position, length, max(1, math.ceil(round(config["recent"] * budget, 6))))


def scores_of_tokens(config: Config, look: Look) -> list[complex]:
    """After a prompt: what all its queries gave, at the first temperature."""
    look.memory["generated"] = 0
    return _added(config, look, config["tau_init"])


def scores_of_step(config: Config, look: Look) -> list[complex]:
    """After a generated token: what it gave, at a temperature that rises."""
    share = min(look.memory.get("generated", 0) / config["steps"], 1)
    look.memory["generated"] = look.memory.get("generated", 0) + 1
    return _added(config, look, config["tau_init"] + (config["tau_end"] - config["tau_init"]) * share)


def statistic_of_head(config: Config, look: Look, number: int, tau: float = 0) -> list[float]:
    """What one query head gave in a prompt."""
    assert look.attention is not None
    tau = tau or config["tau_init"]
    head = look.head * len(look.attention) + number
    total = [0.0] * len(look.positions)
    for t, row in enumerate(look.attention[number].tolist(), look.length - len(look.attention[number])):
        key = _mixed(_mixed(_mixed(config["seed"], look.layer), head), t)
        given = _softmax(
            [
                (math.log(weight) + _gumbel(key, j)) / tau if weight else -math.inf
                for weight, j in zip(row, look.positions, strict=True)
            ]
        )
        total = [sum(pair) for pair in zip(total, given, strict=True)]
    return total


def _added(config: Config, look: Look, tau: float) -> list[complex]:
    assert look.attention is not None
    given = mean_over([statistic_of_head(config, look, number, tau) for number in range(len(look.attention))])
    return [before + new for before, new in zip(look.scores, given, strict=True)]


def _softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(x - max(logits)) for x in logits]
    return [x / sum(powers) for x in powers]


def _gumbel(key: int, number: int) -> float:
    number = _mixed(key, number)
    return -math.log(-math.log(((number >> 9) + 0.5) / 2**23))


def _mixed(key: int, number: int) -> int:
    x = (number * 0x1E3779B1 + key) % 2**32
    for _ in range(2):
        x = (x ^ (x >> 16)) * 0x45D9F3B % 2**32
    return x ^ (x >> 16)
