"""Tokens that are looked at most when the context is repeated."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from ..coding import Config
from ._common import SMALLEST, kept_if_newest

DEFAULTS: Config = {
    "chunk": 2048,
    "sinks": 4,
    "instruction": "",
    "later": "",
    "reply": "",
    "overlap": 8,
    "plus": False,
}
SMALL = "kvzip:chunk=9:sinks=2"


class Text(NamedTuple):
    """One replay of a chunk of one row, without padding.

    Attributes:
        number: Which chunk, from 0.
        queries: [Hq, R, D].
        keys: [H, R, D].
        inputs: What the layer was given at each token, [R, M], for `plus`.
        projection: The output projection, [M, Hq * D], for `plus`.
    """

    number: int
    queries: Tensor
    keys: Tensor
    inputs: Tensor | None = None
    projection: Tensor | None = None


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """Replayed tokens, whose score has an imaginary part, by their score; all others above them, the newest highest.

    Scores that fp32 cannot hold are its smallest number.
    """
    if position < min(config["sinks"], budget // 2):
        return math.inf
    rank = -1 / max(score.real, SMALLEST) if score.imag else float(position)
    return kept_if_newest(rank, position, length, 1)


def texts(config: Config, tokens: list[int]) -> list[list[int]]:
    """What is replayed of a context, text after text."""

    def ids(text: str) -> list[int]:
        return [int(part) for part in text.split("-")] if text else []

    chunk = config["chunk"]
    found = []
    for start in range(0, len(tokens), chunk):
        first = ids(config["instruction"])
        later = ids(config["later"]) or first
        asked = first
        if start:
            repeated = tokens[max(start - config["overlap"], 0) : start] if later and config["overlap"] else []
            asked = later + repeated
        found.append(asked + ids(config["reply"]) + tokens[start : start + chunk])
    return found


def scores_after_replay(
    config: Config,
    keys: Tensor,
    values: Tensor,
    replays: list[Text],
    head: int,
    group: list[int],
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> list[complex]:
    """The scores of one KV head's tokens [n, D] after a replay of all of them."""
    chunk = config["chunk"]
    count = len(keys)
    scores = [0.0] * count
    assert [text.number for text in replays] == list(range(math.ceil(count / chunk))), "every chunk is replayed once"
    whole_keys = keys.double()
    for text in replays:
        own_keys = text.keys[head].double()
        start = text.number * chunk
        stop = min((text.number + 1) * chunk, count)
        shown = list(range(min(config["sinks"], start))) + list(range(start, stop))
        for hq in group:
            for r, query in enumerate(text.queries[hq].double()):
                seen = [whole_keys[j] for j in shown] + [own_keys[i] for i in range(r + 1)]
                logits = [float(query @ key) * scale for key in seen]
                if softcap is not None:
                    logits = [softcap * math.tanh(x / softcap) for x in logits]
                learned = [] if sinks is None else [float(sinks[hq])]
                top = max(logits + learned)
                whole = sum(math.exp(x - top) for x in logits + learned)
                for j, x in zip(shown, logits, strict=False):
                    if j >= start:
                        share = math.exp(x - top) / whole
                        scores[j] = max(scores[j], share * _norms(config, text, r, hq, values[j]))
    return [complex(score, 1) for score in scores]


def _norms(config: Config, text: Text, r: int, hq: int, value: Tensor) -> float:
    """What a token adds to the stream by a query head, over the size of what the replayed token was given."""
    if not config["plus"]:
        return 1.0
    assert text.inputs is not None and text.projection is not None
    width = len(value)
    added = text.projection[:, hq * width : (hq + 1) * width].double() @ value.double()
    return float(added.norm() / text.inputs[r].double().norm())
