"""What a selector sees that looks at more than attention, for one KV head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..coding import Rotation


class Look(NamedTuple):
    """The tokens on offer, in ascending order of position.

    Attributes:
        positions: Of each token.
        keys: As attention reads them, [N][D]; none where only priorities are asked.
        values: As attention reads them, [N][D]; none where only priorities are asked.
        queries: The new queries of each query head as attention takes them, with their positions.
        scale: The factor of the products of queries and keys.
        undo: Takes the rotary embedding of a vector away.
        apply: Puts it back.
        length: Tokens that the row has seen.
        memory: What the selector remembers of the head; one that wraps another shares it with that one.
        scores: Of each token.
        budget: Tokens of the head that the selector may keep.
        attention: What the queries of the newest prompt gave, of each query head of the KV head, [n, N]; None in a
            step, when tokens are ranked again, and where only priorities are asked.
        projection: What each query head of the KV head has of the output projection, [M, D]; None if there is none.
        report: Takes how near a choice was to another one that the engine does not see in the scores.
        layer: Index of the layer.
        head: Which KV head of it.
    """

    positions: list[int]
    keys: list[list[float]]
    values: list[list[float]]
    queries: list[list[tuple[int, Tensor]]]
    scale: float
    undo: Rotation
    apply: Rotation
    length: int
    memory: dict[Any, Any]
    scores: Sequence[complex]
    budget: int
    attention: list[Tensor] | None
    projection: list[Tensor] | None
    report: Callable[[float], None]
    layer: int
    head: int
