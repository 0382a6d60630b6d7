"""Half of the tokens by the attention of another selector, and half by what their values then add to the output."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..coding import Config
from ..exact import floor_share
from . import priorities as priorities_of
from ._common import margin, top
from ._look import Look
from ._outputs import projected_lengths, shares, with_base

DEFAULTS: Config = {"base": {"name": "snapkv"}, "split": 0.5, "epsilon": 1e-4}
SMALL = "critical/snapkv:window=6:kernel=3"


def scores_of_tokens(config: Config, look: Look) -> Sequence[complex]:
    """Mark what the base holds highest, and measure all values; the scores stay those of the base."""
    look = with_base(config, look)
    lengths = projected_lengths(look)
    marked = list[int]()
    if len(look.positions) > look.budget:
        worth = priorities_of(config["base"], look)
        look.report(margin(worth))
        marked = top(worth, floor_share(config["split"], look.budget))
    look.memory["marked"] = {look.positions[j] for j in marked}
    look.memory["lengths"] = dict(zip(look.positions, lengths, strict=True))
    look.memory["mean length"] = sum(lengths) / len(lengths)
    return look.scores


def priorities(config: Config, look: Look) -> list[float]:
    """What the base keeps and what is marked stays, then attention times what a value adds.

    A generated token, which was not measured, adds as much as the mean.
    """
    lengths = look.memory["lengths"]
    mean = look.memory["mean length"]
    found: list[float] = []
    for position, base, share in zip(
        look.positions, priorities_of(config["base"], look), shares(config, look), strict=True
    ):
        stays = math.isinf(base) or position in look.memory["marked"]
        found.append(math.inf if stays else (share + config["epsilon"]) * lengths.get(position, mean))
    return found
