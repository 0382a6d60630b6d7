"""What a selector sees that looks at vectors and not at attention, for one KV head."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..coding import Rotation


class Look(NamedTuple):
    """The tokens on offer, in ascending order of position.

    Attributes:
        positions: Of each token.
        keys: As attention reads them, [N][D].
        values: As attention reads them, [N][D].
        queries: The new queries of each query head as attention takes them, with their positions.
        scale: The factor of the products of queries and keys.
        undo: Takes the rotary embedding of a vector away.
        apply: Puts it back.
        length: Tokens that the row has seen.
        memory: What the selector remembers of the head.
        budget: Tokens that the selector may keep.
        layer_idx: Which layer.
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
    budget: int = 0
    layer_idx: int = 0
