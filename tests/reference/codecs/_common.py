"""What the slow versions of codecs share: a coder whose slots do not depend on each other, and the usual layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from ..coding import Codec, Coder, Config, Given, Pair
from ..versions import version

Calibration = dict[str, Tensor]
"""What was calibrated for one layer."""

Layout = tuple[int, list[int]]
Books = Callable[[int], Calibration]


class Alone(Protocol):
    """A coder whose slots do not depend on each other, once it is fitted."""

    def fit(self, keys: list[Tensor], values: list[Tensor]) -> None: ...

    def code(self, key: Tensor, value: Tensor) -> tuple[Any, Tensor, Tensor]: ...


class Lone:
    """Fits a coder anew whenever it has no live token; see `stages.Coder`.

    Attributes:
        margin: How near any number that was rounded came to a tie, if the coder says so.
    """

    def __init__(self, make: Callable[[int, Given], Alone]) -> None:
        """Start; `make` makes the coder, of a head dimension and of what is known when it is fitted."""
        self.make = make
        self.head: Alone | None = None
        self.margin = math.inf

    def write(self, slots: list[int], tokens: list[Pair], live: list[bool], given: Given) -> list[Pair]:
        """Code tokens wherever they go."""
        if self.head is None or not any(live):
            self.head = self.make(len(tokens[0][0]), given)
            self.head.fit([key for key, _ in tokens], [value for _, value in tokens])
        read = [self.head.code(key, value)[1:] for key, value in tokens]
        self.margin = min(self.margin, getattr(self.head, "margin", math.inf))
        return read


def ordinary(tokens: int, block: int, group_size: int, residual: int, pinned: int = 0, frozen: int = 0) -> Layout:
    """Some tokens exact, and one stage for all others; frozen slots hold no others."""
    exact = pinned + frozen + residual + block
    if tokens < exact:
        return tokens, []
    return exact, [math.ceil((tokens - residual - pinned) / group_size) * group_size]


def side_bits(config: Config) -> tuple[Any, Any]:
    """Bits of keys and of values: those of the side, or those of both."""
    sides = (config.get(name, "auto") for name in ("key_bits", "value_bits"))
    keys, values = (config["bits"] if bits == "auto" else bits for bits in sides)
    return keys, values


def only(config: Config, known: Config) -> Config:
    """The parameters of a codec that its coder knows."""
    return {key: config[key] for key in known if key in config}


def lone(config: Config, make: Callable[[int, int, int, Given], Alone], *, pinned: int = 0, **more: Any) -> Codec:
    """A codec of one stage whose slots are alone; `make` takes layer, head, head dimension and what is given."""
    block = config["block_size"]
    residual = config["residual_length"]
    held = {"frozen" if more.get("pins") == "newest" else "pinned": pinned}

    def coder(stage: int, layer: int, head: int) -> Coder:
        return Lone(lambda dim, given: make(layer, head, dim, given))

    return Codec(
        layout=lambda tokens: ordinary(tokens, block, 1, residual, **held),
        coder=coder,
        block=block,
        residual=residual,
        pinned=pinned,
        **more,
    )


def wrapped(
    config: Config,
    calibration: Books,
    wrap: Callable[[int, int, Coder | None, Coder | None], Coder],
    **more: Any,
) -> Codec:
    """A codec over its base.

    Args:
        config: Its parameters, with `base`: those of the base beside its name.
        calibration: What was calibrated for each layer.
        wrap: Makes the coder, for a layer and a head, of the base's coders of keys and of values; None without a base.
        more: Further fields.
    """
    base = {key: value for key, value in config["base"].items() if key != "name"}
    name: str = config["base"]["name"]
    inner: Codec | None = None if name == "plain" else version("codec", name).codec(base, calibration)
    if inner is None:
        block = config["block_size"]
        group_size = 1
        residual = config["residual_length"]
    else:
        block = inner.block
        group_size = inner.group_size
        residual = inner.residual

    def coder(stage: int, layer: int, head: int) -> Coder:
        keys, values = (None if inner is None else inner.coder(stage, layer, head) for _ in range(2))
        return wrap(layer, head, keys, values)

    return Codec(
        layout=lambda tokens: ordinary(tokens, block, group_size, residual),
        coder=coder,
        block=block,
        group_size=group_size,
        residual=residual,
        **more,
    )


def grouped(config: Config, make: Callable[[], Coder], *, pinned: int = 0) -> Codec:
    """A codec of one stage that is fitted per group of tokens; the first `pinned` ones stay exact."""
    size = config["group_size"]
    residual = config["residual_length"]
    return Codec(
        layout=lambda tokens: ordinary(tokens, size, size, residual, pinned),
        coder=lambda stage, layer, head: make(),
        block=size,
        group_size=size,
        residual=residual,
        pins="first" if pinned else "none",
        pinned=pinned,
    )
