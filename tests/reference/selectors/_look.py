"""What a selector sees that looks at vectors and not at attention, for one KV head."""

from __future__ import annotations

from typing import Any, NamedTuple


class Look(NamedTuple):
    """The tokens on offer, in ascending order of position.

    Attributes:
        positions: Of each token.
        keys: As attention reads them, [N][D].
        values: As attention reads them, [N][D].
        length: Tokens that the row has seen.
        memory: What the selector remembers of the head.
    """

    positions: list[int]
    keys: list[list[float]]
    values: list[list[float]]
    length: int
    memory: dict[str, Any]
