"""KIVIs of 8, 4 and 2 bits, from the newest tokens to the oldest."""

from __future__ import annotations

import math

from ..coding import Codec, Config
from ._common import Books, Layout
from .kivi import Head

SMALL = "staircase:tokens_8bit=4:tokens_4bit=4:group_size=4:residual_length=2"


def codec(config: Config, calibration: Books) -> Codec:
    """KIVIs of 8, 4 and 2 bits; groups that are left over by one stage are the next one's."""
    size = config["group_size"]
    residual = config["residual_length"]

    def layout(tokens: int) -> Layout:
        if tokens < residual + size:
            return tokens, []
        groups = math.ceil((tokens - residual) / size)
        eight = min(math.ceil(config["tokens_8bit"] / size), groups)
        four = min(math.ceil(config["tokens_4bit"] / size), groups - eight)
        return residual + size, [eight * size, four * size, (groups - eight - four) * size]

    return Codec(
        layout=layout,
        coder=lambda stage, layer, head: Head({"bits": (8, 4, 2)[stage], "group_size": size}),
        block=size,
        group_size=size,
        residual=residual,
    )
