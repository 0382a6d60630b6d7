"""The first and last layers keep all that there is, and another allocator divides the rest."""

from __future__ import annotations

from collections.abc import Sequence

from ..coding import Config
from ..versions import version


def budgets(
    config: Config, metrics: Sequence[float] | None, total: int, layers: int, floor: int, ceiling: int
) -> list[int]:
    """Whole budgets; `base` has the name and the parameters of the other allocator."""
    first = config["first"]
    last = config["last"]
    left = layers - first - last
    each = max(ceiling, total // layers)  # what is more than all layers can use is divided evenly
    base = {key: value for key, value in config["base"].items() if key != "name"}
    some = None if metrics is None else metrics[first : layers - last]
    others = version("allocator", config["base"]["name"]).budgets(
        base, some, total - each * (first + last), left, floor, ceiling
    )
    return [each] * first + others + [each] * last
