"""Every codec as the reference engine sees it: its traits, its layout and a coder for each stage of each KV head."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from . import bfp, csr, gear, kivi, kvquant, mikv, rotate, tokenwise, turboquant, zipcache
from .coding import Codec, Coder, Given, Pair
from .exact import ceil_share
from .selectors import Config

Calibration = dict[str, Tensor]
"""What was calibrated for one layer."""

Layout = tuple[int, list[int]]
Books = Callable[[int], Calibration]


class Alone(Protocol):
    """A coder whose slots do not depend on each other, once it is fitted."""

    def fit(self, keys: list[Tensor], values: list[Tensor]) -> None: ...

    def code(self, key: Tensor, value: Tensor) -> tuple[Any, Tensor, Tensor]: ...


class Lone:
    """Fits a coder anew whenever it has no live token; see `stages.Coder`."""

    def __init__(self, make: Callable[[int, Given], Alone]) -> None:
        """Start; `make` makes the coder, of a head dimension and of what is known when it is fitted."""
        self.make = make
        self.head: Alone | None = None

    def write(self, slots: list[int], tokens: list[Pair], live: list[bool], given: Given) -> list[Pair]:
        """Code tokens wherever they go."""
        if self.head is None or not any(live):
            self.head = self.make(len(tokens[0][0]), given)
            self.head.fit([key for key, _ in tokens], [value for _, value in tokens])
        return [self.head.code(key, value)[1:] for key, value in tokens]


class Grouped:
    """GEAR's groups of slots; see `stages.Coder`."""

    def __init__(self, config: Config) -> None:
        """Start without groups."""
        self.config, self.size = config, config["group_size"]
        self.groups: dict[int, gear.Head] = {}

    def write(self, slots: list[int], tokens: list[Pair], live: list[bool], given: Given) -> list[Pair]:
        """Fit a group that has no live token, and overwrite slots of any other."""
        read: dict[int, Pair] = {}
        for group in {slot // self.size for slot in slots}:
            first = group * self.size
            some = {slot - first: pair for slot, pair in zip(slots, tokens, strict=True) if slot // self.size == group}
            some = dict(sorted(some.items()))
            if any(live[first : first + self.size]):
                pairs = [self.groups[group].overwrite(slot, *pair) for slot, pair in some.items()]
            else:
                self.groups[group] = gear.Head(self.config, len(tokens[0][0]))
                pairs = self.groups[group].fit_block(
                    [k for k, _ in some.values()], [v for _, v in some.values()], [*some]
                )
            read |= {first + slot: pair for slot, pair in zip(some, pairs, strict=True)}
        return [read[slot] for slot in slots]


def ordinary(tokens: int, block: int, group_size: int, residual: int, pinned: int = 0, frozen: int = 0) -> Layout:
    """Some tokens exact, and one stage for all others; frozen slots hold no others."""
    exact = pinned + frozen + residual + block
    if tokens < exact:
        return tokens, []
    return exact, [math.ceil((tokens - residual - pinned) / group_size) * group_size]


def _only(config: Config, known: Config) -> Config:
    return {key: config[key] for key in known if key in config}


def _lone(config: Config, make: Callable[[int, int, int, Given], Alone], *, pinned: int = 0, **more: Any) -> Codec:
    """A codec of one stage whose slots are alone; `make` takes layer, head, head dimension and what is given."""
    block, residual = config["block_size"], config["residual_length"]
    held = {"frozen" if more.get("pins") == "newest" else "pinned": pinned}

    def coder(stage: int, layer: int, head: int) -> Coder:
        return Lone(lambda dim, given: make(layer, head, dim, given))

    return Codec(
        layout=lambda tokens: ordinary(tokens, block, 1, residual, **held),
        coder=coder, block=block, residual=residual, pinned=pinned, **more,
    )  # fmt: skip


def _tokenwise(config: Config, calibration: Books) -> Codec:
    own = _only(config, tokenwise.DEFAULTS)
    return _lone(config, lambda layer, head, dim, given: tokenwise.Head(own, dim))


def _bfp(config: Config, calibration: Books) -> Codec:
    own = _only(config, bfp.DEFAULTS)
    return _lone(config, lambda layer, head, dim, given: bfp.Head(own, dim))


def _rotate(config: Config, calibration: Books) -> Codec:
    own = _only(config, rotate.DEFAULTS)
    return _lone(
        config, lambda layer, head, dim, given: rotate.Head(own, dim),
        key_space="unrotated", pins="massive", pinned=config["sinks"],
    )  # fmt: skip


def _turboquant(config: Config, calibration: Books) -> Codec:
    own = _only(config, turboquant.DEFAULTS)
    return _lone(
        config, lambda layer, head, dim, given: turboquant.Head(own, dim, calibration(layer)["signs"].tolist())
    )


def _pair(numbers: Tensor) -> tuple[float, float]:
    first, second = numbers.tolist()
    return first, second


def _kvquant(config: Config, calibration: Books) -> Codec:
    own, bits = _only(config, kvquant.DEFAULTS), config["bits"]

    def make(layer: int, head: int, dim: int, given: Given) -> Alone:
        have = calibration(layer)
        offset, width = (have[f"keys.{name}"].expand(head + 1, -1)[head].tolist() for name in ("offset", "range"))
        levels = [sorted(have[f"{side}.levels.b{bits}"].tolist()) for side in ("keys", "values")]
        norms = [_pair(have[f"{side}.norm.b{bits}"]) if config["norm"] else (1.0, 0.0) for side in ("keys", "values")]
        return kvquant.Head(own, dim, offset, width, levels[0], levels[1], norms[0], norms[1])

    return _lone(
        config, make, key_space="unrotated", pins="first" if config["sinks"] else "none", pinned=config["sinks"]
    )


def _csr(config: Config, calibration: Books) -> Codec:
    own = _only(config, csr.DEFAULTS)

    def make(layer: int, head: int, dim: int, given: Given) -> Alone:
        space = {"unrotated": "pre", "rotated": "post"}[config["key_space"]]
        names = f"keys.{space}", f"values.sn{config['value_chunks']}"
        offline = [[atom / atom.norm() for atom in calibration(layer)[name].float().T] for name in names]
        prompt = [[*side] for side in given.own or ((), ())]
        return csr.Head(own, dim, *offline, *prompt)

    assert not config["read_top_k"], "the reference attends to all"
    pinned = config["prompt_atoms"]
    return _lone(
        config,
        make,
        key_space=config["key_space"],
        pins="newest" if pinned else "none",
        pinned=pinned,
    )


def _kivi(config: Config, calibration: Books) -> Codec:
    size, residual = config["group_size"], config["residual_length"]
    return Codec(
        layout=lambda tokens: ordinary(tokens, size, size, residual),
        coder=lambda stage, layer, head: kivi.Head(config), block=size, group_size=size, residual=residual,
    )  # fmt: skip


def _gear(config: Config, calibration: Books) -> Codec:
    size, residual, own = config["group_size"], config["residual_length"], _only(config, gear.DEFAULTS)
    return Codec(
        layout=lambda tokens: ordinary(tokens, size, size, residual),
        coder=lambda stage, layer, head: Grouped(own), block=size, group_size=size, residual=residual,
    )  # fmt: skip


def _staircase(config: Config, calibration: Books) -> Codec:
    """KIVIs of 8, 4 and 2 bits; groups that are left over by one stage are the next one's."""
    size, residual = config["group_size"], config["residual_length"]

    def layout(tokens: int) -> Layout:
        if tokens < residual + size:
            return tokens, []
        groups = math.ceil((tokens - residual) / size)
        eight = min(math.ceil(config["tokens_8bit"] / size), groups)
        four = min(math.ceil(config["tokens_4bit"] / size), groups - eight)
        return residual + size, [eight * size, four * size, (groups - eight - four) * size]

    return Codec(
        layout=layout, coder=lambda stage, layer, head: kivi.Head({"bits": (8, 4, 2)[stage], "group_size": size}),
        block=size, group_size=size, residual=residual,
    )  # fmt: skip


def _mikv(config: Config, calibration: Books) -> Codec:
    block, residual, precise = config["block_size"], config["residual_length"], config["high_bits"] == 16
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
            return mikv.Head(own, dim, given.query_absmax.tolist())

        return Lone(make)

    return Codec(layout=layout, coder=coder, block=block, residual=residual, demote_by="priority")


def _zipcache(config: Config, calibration: Books) -> Codec:
    every, widths = config["recode_every"], (config["high_bits"], config["bits"])

    def layout(tokens: int) -> Layout:
        high = ceil_share(config["high"], tokens)
        return (every, [high, tokens - high]) if tokens >= every else (tokens, [])

    def coder(stage: int, layer: int, head: int) -> Coder:
        return Lone(lambda dim, given: zipcache.Head({"bits": widths[stage]}, dim))

    return Codec(layout=layout, coder=coder, block=every, demote_by="priority", recode_all=True)


MAKERS: dict[str, Callable[[Config, Books], Codec]] = {
    "kivi": _kivi,
    "tokenwise": _tokenwise,
    "bfp": _bfp,
    "gear": _gear,
    "kvquant": _kvquant,
    "rotate": _rotate,
    "turboquant": _turboquant,
    "staircase": _staircase,
    "csr": _csr,
    "mikv": _mikv,
    "zipcache": _zipcache,
}


def no_book(layer: int) -> Calibration:
    """Of codecs that are not calibrated."""
    return {}


def make(name: str, config: Config, calibration: Books = no_book) -> Codec | None:
    """A codec by its name; None for `plain`, which codes nothing.

    Args:
        name: A registered name.
        config: All its parameters.
        calibration: What was calibrated for each layer.
    """
    return None if name == "plain" else MAKERS[name](config, calibration)
