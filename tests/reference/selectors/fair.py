"""The same share of every part of a prompt, and in each part the tokens that another selector ranks highest."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ..coding import Config
from . import priorities as priorities_of
from . import scores_of_layer as scores_of_base
from ._common import margin
from ._look import Look

DEFAULTS: Config = {"base": {"name": "snapkv"}, "at": "auto", "parts": 2}
SMALL = "fair:at=5_11/snapkv:window=6:kernel=3"


def part_of(config: Config, position: int, length: int) -> int:
    """The number of the part that a position of a row belongs to."""
    if config["at"] == "auto":
        return position * config["parts"] // length
    return sum(position >= int(begin) for begin in re.findall(r"\d+", config["at"]))


def scores_of_layer(config: Config, looks: list[Look]) -> list[Sequence[complex] | None]:
    """Count which tokens of its part rank above each token of a prompt; the scores stay those of the base."""
    scores = scores_of_base(config["base"], looks)
    if looks[0].attention is None:  # the base ranks its tokens again
        return scores
    for look, new in zip(looks, scores, strict=True):
        worth = priorities_of(config["base"], look._replace(scores=look.scores if new is None else new))
        look.report(margin(worth))
        parts = [part_of(config, position, look.length) for position in look.positions]
        sizes = [part_of(config, position, look.length) for position in range(look.length)]
        look.memory["shares"] = {}
        for j, position in enumerate(look.positions):
            above = [
                i
                for i in range(len(parts))
                if parts[i] == parts[j] and (worth[i] > worth[j] or (worth[i] == worth[j] and i < j))
            ]
            look.memory["shares"][position] = (len(above) + 0.5) / sizes.count(parts[j])
    return scores


def priorities(config: Config, look: Look) -> list[float]:
    """What the base keeps stays, and the newest token; then generated tokens by age, then the others by share."""
    shares = look.memory["shares"]
    found: list[float] = []
    for position, base in zip(look.positions, priorities_of(config["base"], look), strict=True):
        worth = -shares[position] if position in shares else float(position)
        found.append(math.inf if math.isinf(base) or position == look.length - 1 else worth)
    return found
