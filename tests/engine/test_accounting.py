"""Every tensor of a layer is counted once, under its kind."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.state import bytes_by_kind


class Stage(NamedTuple):
    keys: Tensor
    key_scale: Tensor
    values: Tensor
    zero_of_values: Tensor


def numbers(count: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(count, dtype=dtype)


def test_kinds_follow_the_names_of_fields() -> None:
    stage = Stage(numbers(7, torch.uint8), numbers(5, torch.float16), numbers(3, torch.int8), numbers(1, torch.float32))
    other = Stage(*(torch.empty(0) for _ in range(4)))
    state = (numbers(2, torch.float32), (numbers(3, torch.uint8),))
    found = bytes_by_kind(
        [numbers(4, torch.bfloat16), numbers(6, torch.float32)],
        [stage, other, stage],
        numbers(9, torch.int32),
        state,
        [numbers(1, torch.int64), numbers(0, torch.int64)],
    )
    assert found == {
        "exact": 4 * 2 + 6 * 4,
        "codes": 2 * (7 + 3),
        "scales": 2 * (5 * 2 + 4),
        "positions": 36,
        "statistics": 8 + 3,
        "index": 0,
        "counters": 8,
    }


def test_nothing_is_no_bytes() -> None:
    found = bytes_by_kind([], [], torch.empty(0, dtype=torch.int32), (), [])
    assert set(found.values()) == {0} and len(found) == 7
