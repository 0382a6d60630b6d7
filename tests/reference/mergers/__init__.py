"""What becomes of a token that is not kept, for one KV head: the slow version of each merger stands in its file.

A file has `merge_prompt` and, if the merger also acts in decoding, `merge_token`. Both change the targets, and return
how near a choice of theirs was to another one (infinity if there was none). `SMALL` is a spec with numbers that fit
tiny models.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..coding import Config, Token
from ..versions import version


def merge_prompt(
    config: Config | None,
    memory: dict[str, Any],
    tokens: list[Token],
    kept: set[int],
    targets: list[Token],
    attention: list[Tensor],
) -> float:
    """Merge what a prompt evicts.

    Args:
        config: The merger, with `name` and its parameters; None for `drop`.
        memory: What the merger remembers of the head, which it may change, and under `worth` what each position
            is worth to the selector.
        tokens: All tokens on offer, ascending by position.
        kept: Positions of those that are kept.
        targets: The kept ones that may change, ascending by position.
        attention: Matrix [n, N] of every query head of this KV head; columns as in `tokens`.
    """
    if config is None or len(kept) == len(tokens):
        return math.inf
    return version("merger", config["name"]).merge_prompt(config, memory, tokens, kept, targets, attention)


def merge_token(config: Config | None, memory: dict[str, Any], victim: Token, targets: list[Token]) -> float:
    """Merge the token that a decode step evicts into one of `targets`, ascending by position."""
    own = None if config is None else getattr(version("merger", config["name"]), "merge_token", None)
    return math.inf if own is None else own(config, memory, victim, targets)
