"""Tokens of prompts stay, and another selector ranks the generated ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..coding import Config
from . import priorities as priorities_of
from . import scores_of_layer as scores_of_base
from ._look import Look

DEFAULTS: Config = {"base": {"name": "h2o"}}


def scores_of_layer(config: Config, looks: list[Look]) -> list[Sequence[complex] | None]:
    """Note which tokens a prompt adds; the scores are those of the base."""
    for look in looks:
        if look.attention is not None:  # not if the base ranks its tokens again
            first = look.length - len(look.attention[0])
            look.memory.setdefault("prompts", set()).update(at for at in look.positions if at >= first)
    return scores_of_base(config["base"], looks)


def priorities(config: Config, look: Look) -> list[float]:
    """What the base says of generated tokens."""
    worth = priorities_of(config["base"], look)
    return [math.inf if at in look.memory["prompts"] else x for at, x in zip(look.positions, worth, strict=True)]
