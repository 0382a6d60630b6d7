"""Nothing is merged."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..coding import Config, Token


def merge_prompt(
    config: Config,
    memory: dict[str, Any],
    tokens: list[Token],
    kept: set[int],
    targets: list[Token],
    attention: list[Tensor],
) -> float:
    """What is not kept is gone."""
    return math.inf
