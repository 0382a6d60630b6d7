"""Keys without the channels that add least to the scores of the newest queries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..coding import Codec, Coder, Config, Given, Pair
from ..scalars import LARGEST_HALF, half, scalars, vector
from ._common import Books, wrapped

SMALL = "think:ratio=0.4:residual_length=4:block_size=4"


def channels(query_square: list[float], keys: list[Tensor], kept: int) -> tuple[list[int], float]:
    """The channels c of the largest mean q_c^2 times mean k_c^2, the first of equal ones, in ascending order.

    Returns:
        The channels; and how much better the last one is than the best that is left out, as a share.
    """
    queries = query_square if any(query_square) else [1.0] * len(query_square)
    worth: list[float] = []
    for c, q in enumerate(queries):
        squares = [min(abs(float(key[c])), LARGEST_HALF) ** 2 for key in keys]
        worth.append(float(torch.tensor(q * math.fsum(squares) / len(squares), dtype=torch.float32)))
    order = sorted(range(len(worth)), key=lambda c: (-worth[c], c))
    last = worth[order[kept - 1]]
    best = worth[order[kept]] if kept < len(order) else 0.0
    return sorted(order[:kept]), (last - best) / last if last and last != best else math.inf


class Halves:
    """Vectors whose numbers are rounded to fp16."""

    def write(self, slots: list[int], tokens: list[Pair], live: list[bool], given: Given) -> list[Pair]:
        """See `stages.Coder`."""
        return [(self._half(key), self._half(value)) for key, value in tokens]

    def _half(self, x: Tensor) -> Tensor:
        return vector([half(number) for number in scalars(x)])


class Head:
    """One KV head: its channels, and what codes keys of these channels and values of all channels."""

    def __init__(self, config: Config, keys: Coder, values: Coder) -> None:
        """Start without channels; keys and values are coded by different coders, since they have different lengths."""
        self.ratio = config["ratio"]
        self.whole_bytes = config["base"]["name"] != "plain"
        self.of_keys = keys
        self.of_values = values
        self.kept: list[int] = []
        self.margin = math.inf

    def write(self, slots: list[int], tokens: list[Pair], live: list[bool], given: Given) -> list[Pair]:
        """See `stages.Coder`."""
        if not any(live):
            assert given.query_square is not None
            dim = len(tokens[0][0])
            count = dim - int(self.ratio * dim)
            if self.whole_bytes:
                count = min(math.ceil(count / 8) * 8, dim)
            self.kept, gap = channels(given.query_square.tolist(), [key for key, _ in tokens], count)
            self.margin = min(self.margin, gap)
        few = [key[self.kept] for key, _ in tokens]
        keys = self.of_keys.write(slots, [(key, key) for key in few], live, given)
        values = self.of_values.write(slots, [(value, value) for _, value in tokens], live, given)
        for coder in (self.of_keys, self.of_values):
            self.margin = min(self.margin, getattr(coder, "margin", math.inf))
        read: list[Pair] = []
        for (whole, _), (key, _), (_, value) in zip(tokens, keys, values, strict=True):
            restored = torch.zeros(len(whole))
            for c, x in zip(self.kept, key.tolist(), strict=True):
                restored[c] = x
            read.append((restored, value))
        return read


def codec(config: Config, calibration: Books) -> Codec:
    """The codec as the engine sees it."""

    def wrap(layer: int, head: int, keys: Coder | None, values: Coder | None) -> Coder:
        return Head(config, keys or Halves(), values or Halves())

    return wrapped(config, calibration, wrap, query_squares=config["window"])
