"""Tokens with the largest random numbers."""

from __future__ import annotations

import math

from ..coding import Config
from ._look import Look

DEFAULTS: Config = {"seed": 0}
SMALL = "random:seed=3"


def priorities(config: Config, look: Look) -> list[float]:
    """24 bits of a number of seed, layer, head and position; the newest token stays."""
    key = _mixed(_mixed(config["seed"], look.layer), look.head)
    return [math.inf if at == look.length - 1 else float(_mixed(key, at) // 256) for at in look.positions]


def _mixed(key: int, number: int) -> int:
    x = (number * 0x1E3779B1 + key) % 2**32
    for _ in range(2):
        x = (x ^ (x >> 16)) * 0x45D9F3B % 2**32
    return x ^ (x >> 16)
