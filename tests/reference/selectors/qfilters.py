"""Tokens whose keys have the smallest product with the filter of the head, which a file has."""

from __future__ import annotations

import functools

from safetensors.torch import load_file

from ..coding import Config
from ._common import kept_if_newest
from ._look import Look

DEFAULTS: Config = {"file": ""}
"""Without a file, all tokens are worth the same."""
SMALL = "qfilters:file=FOLDER/qfilters/filters.safetensors"


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """The score; the newest token stays."""
    return kept_if_newest(score.real, position, length, 1)


def scores_of_tokens(config: Config, look: Look) -> list[float]:
    """Minus the product of each key and the filter."""
    if not config["file"]:
        return [0.0] * len(look.keys)
    own = filter_of(config["file"], look.layer, look.head)
    return [-sum(a * b for a, b in zip(own, key, strict=True)) for key in look.keys]


def score_of_newest(config: Config, look: Look) -> float:
    """The same of the newest token."""
    return scores_of_tokens(config, look._replace(keys=look.keys[-1:]))[0]


@functools.cache
def filter_of(file: str, layer: int, head: int) -> list[float]:
    """The filter of a head in a file, in which all heads of a layer may share one."""
    filters = load_file(file)[f"filters.{layer}"].tolist()
    return filters[head] if len(filters) > 1 else filters[0]
