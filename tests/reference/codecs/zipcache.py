"""Few bits per number, token by token, after each channel was divided by the root of its largest number."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..coding import Codec, Coder, Config
from ..exact import ceil_share
from ..scalars import Coded, column, complete, grouped, half, scalars, vector
from ._common import Books, Layout, Lone, side_bits

DEFAULTS: Config = {"bits": 2, "key_bits": "auto", "value_bits": "auto"}
SMALL = "zipcache:recode_every=5"


def roots(tokens: list[Tensor]) -> list[np.float32]:
    """c = sqrt(max |x|) of each channel, 1 where that is 0."""
    cs = [half(np.sqrt(max(abs(x) for x in column(tokens, c)))) for c in range(len(tokens[0]))]
    return [c if c > 0 else np.float32(1) for c in cs]


class Head:
    """One KV head: the divisors of its keys' and values' channels."""

    def __init__(self, config: Config, head_dim: int) -> None:
        """Start with divisors of one."""
        self.config = complete(DEFAULTS, config)
        self.by = [[np.float32(1)] * head_dim, [np.float32(1)] * head_dim]

    def fit(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Take the divisors from the tokens."""
        self.by = [roots(keys), roots(values)]

    def code(self, key: Tensor, value: Tensor) -> Coded:
        """Codes of a token, and what is read back of its key and value."""
        codes: list[list[float]] = []
        reads: list[Tensor] = []
        for x, by, bits in zip((key, value), self.by, side_bits(self.config), strict=True):
            even = [v / c for v, c in zip(scalars(x), by, strict=True)]
            some, inner = grouped(even, len(even), bits)
            codes.append(some)
            reads.append(vector([v * c for v, c in zip(inner, by, strict=True)]))
        return {"key": codes[0], "value": codes[1]}, reads[0], reads[1]


def codec(config: Config, calibration: Books) -> Codec:
    """The codec as the engine sees it."""
    every = config["recode_every"]
    others = {key: config[key] for key in DEFAULTS if key in config}
    widths = ({"bits": config["high_bits"]}, others)

    def layout(tokens: int) -> Layout:
        high = ceil_share(config["high"], tokens)
        return (every, [high, tokens - high]) if tokens >= every else (tokens, [])

    def coder(stage: int, layer: int, head: int) -> Coder:
        return Lone(lambda dim, given: Head(widths[stage], dim))

    return Codec(layout=layout, coder=coder, block=every, demote_by="priority", recode_all=True)
