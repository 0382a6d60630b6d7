"""Bytes: what one layer holds, or will hold."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

from kvpolicy.engine.accounting import bytes_by_kind
from kvpolicy.engine.row_limits import alloc_limits
from kvpolicy.engine.state import tensors
from kvpolicy.policy import Policy
from kvpolicy.protocols import LayerShape, Layout

DIGEST_NBYTES = 8
"""Bytes of each row's mask digest, which the first layer of a cache holds."""


@lru_cache(maxsize=4096)
def layer_bytes(policy: Policy, batch: int, shape: LayerShape, layout: Layout) -> dict[str, int]:
    """Bytes by kind that one layer holds: what the cache allocates, asked of tensors without storage."""
    slots, heads, dim = layout.slots, shape.heads, shape.head_dim
    exact = torch.empty(batch, shape.heads, layout.exact, shape.head_dim, dtype=shape.dtype, device="meta")
    stages = zip(policy.codec.stages, layout.coded, strict=False)
    codes = tuple(stage.alloc(batch, heads, size, dim, "meta") for stage, size in stages)
    rows = alloc_limits(policy.codec, batch, heads, dim, "meta")
    positions = torch.empty(batch, shape.heads, slots, dtype=torch.int32, device="meta")
    state = policy.selector.alloc(batch, shape.heads, slots, "meta")
    counters = torch.empty(2 * batch + 1, dtype=torch.int64, device="meta")
    return bytes_by_kind((exact, exact), codes, positions, state, (counters, *(rows or ())))


def resident_bytes(calibrations: Iterable[Any]) -> int:
    """Bytes of calibrated tensors, those that layers share counted once."""
    return sum({t.data_ptr(): t.nbytes for calibration in calibrations for t in tensors(calibration)}.values())


def planned_resident(policy: Policy, layers: tuple[int, ...], heads: slice) -> int:
    """Bytes of the calibrated tensors of some layers and heads; they belong to the model and count in no budget."""
    return _resident(policy, layers, heads.start, heads.stop)


@lru_cache(maxsize=64)
def _resident(policy: Policy, layers: tuple[int, ...], first: int | None, last: int | None) -> int:
    held = slice(first, last)  # no key of a cache itself, before Python 3.12
    return resident_bytes(
        [stage.load_calibration(index, "cpu", held) for stage in policy.codec.stages for index in layers]
    )
