"""Runs of neighboring tokens that stay or go together, in all KV heads of a layer, by the worth of another selector."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..coding import Config
from . import priorities as priorities_of
from . import scores_of_layer as scores_of_base
from ._common import margin
from ._look import Look
from ._outputs import BASES, attention_in

DEFAULTS: Config = {"base": {"name": "snapkv"}, "size": 20}
SMALL = "chunk:size=3/snapkv:window=6:kernel=3"


def scores_of_layer(config: Config, looks: list[Look]) -> list[Sequence[complex] | None]:
    """Give every token of a prompt the mean worth of its chunk; the scores stay those of the base."""
    scores = scores_of_base(config["base"], looks)
    if looks[0].attention is None:  # the base ranks its tokens again
        return scores
    worths: list[dict[int, float]] = []
    for look, new in zip(looks, scores, strict=True):
        look = look._replace(scores=look.scores if new is None else new)
        worths.append(dict(zip(look.positions, worth_of(config["base"], look), strict=True)))
    members: dict[int, list[list[float]]] = {}
    for position in sorted({position for own in worths for position in own}):
        finite = [own[position] for own in worths if math.isfinite(own.get(position, math.inf))]
        if finite:
            members.setdefault(position // config["size"], []).append(finite)
    means = {chunk: sum(sum(own) / len(own) for own in heads) / len(heads) for chunk, heads in members.items()}
    sizes = [sum(abs(x) for own in heads for x in own) / len(heads) for heads in members.values()]
    doubts = [size / abs(mean) if mean else math.inf for size, mean in zip(sizes, means.values(), strict=True)]
    looks[0].report(
        margin([*means.values()], [doubt if size else 1.0 for doubt, size in zip(doubts, sizes, strict=True)])
    )
    for look in looks:
        look.memory["chunks"] = {position: means.get(position // config["size"], 0.0) for position in look.positions}
    return scores


def worth_of(base: Config, look: Look) -> list[float]:
    """What the base thinks of each token: the attention that it knows of, else its priority; infinite if it stays."""
    worth = priorities_of(base, look)
    if base["name"] in BASES:
        seen = [attention_in(base, score) for score in look.scores]
        return [math.inf if math.isinf(x) else attention for x, attention in zip(worth, seen, strict=True)]
    if base["name"] == "kvzip":
        seen = [score.real if score.imag else 1.0 for score in look.scores]
        return [math.inf if math.isinf(x) else attention for x, attention in zip(worth, seen, strict=True)]
    if base["name"] == "kvzap":
        seen = [math.exp(min(score.real, 64.0)) for score in look.scores]
        return [math.inf if math.isinf(x) else attention for x, attention in zip(worth, seen, strict=True)]
    return worth


def priorities(config: Config, look: Look) -> list[float]:
    """What the base keeps stays, and the newest token; then generated tokens by age, then the others by chunk."""
    chunks = look.memory["chunks"]
    highest = max((chunks[position] for position in look.positions if position in chunks), default=0.0)
    found: list[float] = []
    for position, base in zip(look.positions, priorities_of(config["base"], look), strict=True):
        worth = chunks.get(position, highest + 1 + position)
        found.append(math.inf if math.isinf(base) or position == look.length - 1 else worth)
    return found
