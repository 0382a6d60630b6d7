"""How many tokens each layer may keep, for one row: the slow version of each allocator stands in the file of its name.

A file has `budgets`, which takes the allocator's parameters, the metric of each layer (None for an allocator that has
none), the tokens of all layers, the number of layers, and the fewest and most tokens of a layer. `SMALL` is a spec
with numbers that fit tiny models. The file of an allocator that measures attention has `measure`, too: the metric of a
layer by a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..coding import Config
from ..versions import version
from ._common import base_budget as base_budget
from ._common import waterfill as waterfill


def budgets(
    name: str, config: Config, metrics: Sequence[float] | None, total: int, layers: int, floor: int, ceiling: int
) -> list[int]:
    """What the allocator `name` gives each layer."""
    return version("allocator", name).budgets(config, metrics, total, layers, floor, ceiling)
