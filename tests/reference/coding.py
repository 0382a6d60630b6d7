"""What the reference engine and its codecs tell each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Config = dict[str, Any]
"""The parameters of a method, by name."""

Pair = tuple[Tensor, Tensor]
"""A key and a value, each [D]."""

Rotation = Callable[[Tensor, int], Tensor]
"""Rotates a key [D] that stands at a position."""


@dataclass(eq=False)
class Token:
    """A kept token of one KV head.

    Attributes:
        position: Its original position.
        key: As it came, [D].
        value: As it came, [D].
        score: What the selector remembers of it.
        count: How many tokens it stands for.
        stays: Whether it stands in for others and is never evicted in decode.
        place: Its stage and slot once it is coded.
        stored: What its stage reads back of it, key in the codec's key space.
        read: What attention reads once it is coded: key and value.
    """

    position: int
    key: Tensor
    value: Tensor
    score: complex = 0.0
    stays: bool = False
    count: float = 1.0
    place: tuple[int, int] | None = None
    stored: Pair | None = None
    read: Pair | None = None

    @property
    def seen_key(self) -> Tensor:
        """The key that attention reads, fp64."""
        return (self.read[0] if self.read else self.key).double()

    @property
    def seen_value(self) -> Tensor:
        """The value that attention reads, fp64."""
        return (self.read[1] if self.read else self.value).double()


def seen(tokens: list[Token]) -> Pair:
    """The keys and the values that attention reads, each [N, D] fp64."""
    keys = torch.stack([token.read[0] if token.read else token.key for token in tokens])
    values = torch.stack([token.read[1] if token.read else token.value for token in tokens])
    return keys.double(), values.double()


class Given(NamedTuple):
    """What a codec may know beside the tokens it codes.

    Attributes:
        own: Keys and values of the head's frozen slots, [W, D] each; None where nothing was frozen.
        query_absmax: Largest |query| of each channel in the prompts, [D].
        query_square: Mean square of each channel of the newest queries of the last prompt, [D].
    """

    own: Pair | None = None
    query_absmax: Tensor | None = None
    query_square: Tensor | None = None


class Coder(Protocol):
    """One stage of one KV head."""

    def write(self, slots: list[int], tokens: list[Pair], live: list[bool], given: Given) -> list[Pair]:
        """Code tokens, keys in the codec's key space, and say what is read back of each.

        Args:
            slots: Where each goes.
            tokens: Keys and values.
            live: Which slots hold a token that stays.
            given: What else may be known.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Codec:
    """A codec as the engine sees it; the fields say what those of `kvpolicy.protocols.Traits` say.

    Attributes:
        layout: Exact slots and those of each stage, for a row of so many tokens.
        coder: Makes the coder of a stage, for a layer and a KV head.
    """

    layout: Callable[[int], tuple[int, list[int]]]
    coder: Callable[[int, int, int], Coder]
    block: int
    group_size: int = 1
    residual: int = 0
    key_space: Literal["rotated", "unrotated"] = "rotated"
    demote_by: Literal["age", "priority"] = "age"
    pins: Literal["none", "first", "massive", "newest"] = "none"
    pinned: int = 0
    recode_all: bool = False
    query_squares: int = 0


@dataclass(frozen=True)
class KeysAlone:
    """Codes keys of which a part is their value: what is read of a value is that part of what is read of its key."""

    coder: Coder

    def write(self, slots: list[int], tokens: list[Pair], live: list[bool], given: Given) -> list[Pair]:
        read = self.coder.write(slots, [(key, key) for key, _ in tokens], live, given)
        return [(key, key[: value.shape[-1]]) for (key, _), (_, value) in zip(read, tokens, strict=True)]


def keys_alone(codec: Codec) -> Codec:
    """A codec of keys of which a part is their value."""
    return replace(codec, coder=lambda *where: KeysAlone(codec.coder(*where)))


def as_it_is(key: Tensor, position: int) -> Tensor:
    return key
