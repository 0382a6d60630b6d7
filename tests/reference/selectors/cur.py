"""Tokens with long keys and values, among those around them."""

from __future__ import annotations

from ..coding import Config
from ._look import Look
from ._once import priority as priority
from ._once import waiting

DEFAULTS: Config = {"sinks": 4, "window": 16, "of": "product", "every": 128}
SMALL = "cur:sinks=2:window=4:every=7"


def rerank_every(config: Config) -> int:
    """After how many generated tokens those are scored."""
    return config["every"]


def scores_of_tokens(config: Config, look: Look) -> list[complex]:
    """Score the tokens without a score, each beside the others of its window."""
    scores = list(look.scores)
    windows = dict[int, list[int]]()
    for j in waiting(config, look):
        windows.setdefault(look.positions[j] // config["window"], []).append(j)
    for window in windows.values():
        keys = leverage([look.keys[j] for j in window])
        values = leverage([look.values[j] for j in window])
        for j, key, value in zip(window, keys, values, strict=True):
            scores[j] = complex(combined(config, key, value), 1)
    return scores


def leverage(vectors: list[list[float]]) -> list[float]:
    """The squared length of each vector, in multiples of the mean."""
    squares = [sum(x * x for x in vector) for vector in vectors]
    mean = sum(squares) / len(squares)
    return [x / mean if mean else 0.0 for x in squares]


def combined(config: Config, key: float, value: float) -> float:
    """The score of a token by its key and its value, as if its window were full."""
    window = config["window"]
    return {
        "product": key / window * value / window,
        "keys": key / window,
        "values": value / window,
        "mean": (key + value) / (2 * window),
    }[config["of"]]
