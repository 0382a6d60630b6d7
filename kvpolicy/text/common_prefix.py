"""What two texts have in common at their beginning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many tokens, or characters, two texts have in common at their beginning.

    Examples:
        >>> common_length([5, 6, 7], [5, 6, 8, 7]), common_length([5], [5, 6]), common_length([5], [])
        (2, 1, 0)
    """
    least = 0
    most = min(len(one), len(other))
    while least < most:  # slices are compared much faster than tokens one by one
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
