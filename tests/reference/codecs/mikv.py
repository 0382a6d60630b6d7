"""Tokens of less importance in few bits, after keys were balanced against queries channel by channel."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from ..coding import Codec, Coder, Config, Given
from ..exact import ceil_share
from ..scalars import Coded, column, complete, grouped, half, half_tie, largest_divisor, scalars, vector
from ._common import Alone, Books, Layout, Lone

DEFAULTS: Config = {"bits": 2, "group_size": 128}
SMALL = "mikv:high=0.3:high_bits=8:residual_length=2:block_size=3"


class Head:
    """One KV head: its balancer.

    Attributes:
        margin: How near a factor of the balancer came to a tie in fp16, as a share of the factor. Keys that were coded
            before and are read back may differ in their last bit.
    """

    def __init__(self, config: Config, head_dim: int, query_absmax: list[float]) -> None:
        """Start with a balancer of ones.

        Args:
            config: `bits` and `group_size`.
            head_dim: Channels.
            query_absmax: Largest |query| of each channel in the prompt.
        """
        self.config = complete(DEFAULTS, config)
        self.width = largest_divisor(head_dim, self.config["group_size"])
        self.query_absmax = query_absmax
        self.balance = [np.float32(1)] * head_dim
        self.margin = math.inf

    def fit(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """b = sqrt(max |q| / max |k|): k * b and q / b then have the same peak in every channel."""
        for c, peak in enumerate(self.query_absmax):
            largest = max(abs(x) for x in column(keys, c))
            b = np.sqrt(np.float32(peak) / largest) if peak and largest else np.float32(1)
            b = max(b, 2.0**-14)  # below, fp16 has fewer digits
            self.margin = min(self.margin, half_tie(b) / float(b))
            self.balance[c] = half(b)

    def code(self, key: Tensor, value: Tensor) -> Coded:
        """Codes of a token, and what is read back of its key and value."""
        even = [x * b for x, b in zip(scalars(key), self.balance, strict=True)]
        key_codes, inner = grouped(even, self.width, self.config["bits"])
        value_codes, value_read = grouped(scalars(value), self.width, self.config["bits"])
        key_read = [x / b for x, b in zip(inner, self.balance, strict=True)]
        return {"key": key_codes, "value": value_codes}, vector(key_read), vector(value_read)


def codec(config: Config, calibration: Books) -> Codec:
    """The codec as the engine sees it."""
    block = config["block_size"]
    residual = config["residual_length"]
    precise = config["high_bits"] == 16
    widths = [config["bits"]] if precise else [8, config["bits"]]

    def layout(tokens: int) -> Layout:
        high = ceil_share(config["high"], tokens)
        exact = residual + block + (high if precise else 0)
        if tokens < exact:
            return tokens, []
        if precise:
            return exact, [tokens - residual - high]
        first = max(min(high, tokens - residual), block)
        return exact, [first, tokens - residual - first]

    def coder(stage: int, layer: int, head: int) -> Coder:
        own = {"bits": widths[stage], "group_size": config["group_size"]}

        def make(dim: int, given: Given) -> Alone:
            assert given.query_absmax is not None
            return Head(own, dim, given.query_absmax.tolist())

        return Lone(make)

    return Codec(layout=layout, coder=coder, block=block, residual=residual, demote_by="priority")
