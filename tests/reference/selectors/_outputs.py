"""What a token does to the output of attention and of the layer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..coding import Config
from . import scores_of_tokens
from ._look import Look

BASES = ("a2sf", "h2o", "keyformer", "kvzap", "probe", "snapkv")
"""Selectors whose score of a token says what attention it got."""


def attention_in(base: Config, score: complex) -> float:
    """The attention that a token got, by its score."""
    if base["name"] == "kvzap":  # the logarithm of what it expects
        return math.exp(score.real)
    return score.real / max(score.imag, 1)  # a probe's score has a count beside it


def with_base(config: Config, look: Look) -> Look:
    """The tokens with the scores that the base has of them, if it looks at a prompt by itself."""
    scores = None if look.attention is None else scores_of_tokens(config["base"], look)
    return look if scores is None else look._replace(scores=scores)


def projected_lengths(look: Look) -> list[float]:
    """The 1-norm of each value behind the output projection, in the mean of the query heads."""
    assert look.projection is not None, "this selector looks at the output projection"
    found: list[float] = []
    for value in look.values:
        vector = torch.tensor(value, dtype=torch.float64)
        norms = [sum(abs(x) for x in (matrix.double() @ vector).tolist()) for matrix in look.projection]
        found.append(sum(norms) / len(norms))
    return found


def shares(config: Config, look: Look) -> list[float]:
    """Each token's share of the attention that the base of a selector knows of."""
    assert config["base"]["name"] in BASES, f"the base must be one of {BASES}"
    held = [attention_in(config["base"], score) for score in look.scores]
    return [x / sum(held) if sum(held) else 0.0 for x in held]


def mixed(weights: list[float], values: list[list[float]]) -> list[float]:
    """The sum of the values, each times its weight."""
    return [sum(w * x for w, x in zip(weights, channel, strict=True)) for channel in zip(*values, strict=True)]


def odds(share: float) -> float:
    """A share in relation to the rest."""
    return share / rest(share)


def rest(share: float) -> float:
    """What a share leaves, at least a millionth."""
    return max(1 - share, 1e-6)


class Apart(NamedTuple):
    """How far a value is from the output, and how long both are together."""

    distance: float
    size: float


def apart(value: list[float], output: list[float]) -> Apart:
    """Compare a value with the output."""
    return Apart(math.dist(value, output), math.hypot(*value) + math.hypot(*output))
