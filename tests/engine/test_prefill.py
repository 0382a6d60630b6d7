"""What is kept of a prompt until its budget is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kvpolicy.engine.attention import QueryWindow, ScoreTransform
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.protocols import Forward

WINDOW = QueryWindow(torch.zeros(3, 4, 2, 8), torch.zeros(3, 2, dtype=torch.int64))
VALID = [[True] * 5, [False, False, True, True, True], [True, False, True, False, False]]


def prompt(valid: Any = None, **more: Any) -> PendingPrompt:
    keys, values = torch.zeros(3, 2, 5, 8), torch.ones(3, 2, 5, 8)
    return PendingPrompt(keys, values, None if valid is None else torch.tensor(valid), ScoreTransform(1.0), **more)


@pytest.mark.parametrize("seen", [[0, 0, 0], [4, 0, 9]])
@pytest.mark.parametrize("valid", [None, VALID, [[False] * 5, [True] * 5, [False] * 5]])
def test_rows_are_counted_without_padding(valid: list[list[bool]] | None, seen: list[int]) -> None:
    one = prompt(valid)
    flags = valid or [[True] * 5] * 3
    positions: list[list[int]] = []
    for row, start in zip(flags, seen, strict=True):
        count, found = start, list[int]()
        for there in row:
            found.append(count if there else -1)
            count += there
        positions.append(found)
    assert one.positions(torch.tensor(seen)).tolist() == positions
    assert one.positions(torch.tensor(seen)).dtype == torch.int32
    assert one.lengths(torch.tensor(seen)).tolist() == [
        start + sum(row) for row, start in zip(flags, seen, strict=True)
    ]


def test_idle_rows_have_nothing_but_padding() -> None:
    assert prompt().idle is None
    idle = prompt([[False] * 5, [False, True, False, False, False], [False] * 5]).idle
    assert idle is not None and idle.tolist() == [True, False, True]


def test_what_reads_the_slots_before_it() -> None:
    assert not prompt().reads_past and not prompt(attn_sum=torch.zeros(3, 4, 5)).reads_past
    forward = Forward(nn.Identity(), torch.zeros(3, 5, 16), {})
    for more in ({"window": WINDOW}, {"probes": WINDOW}, {"forward": forward}):
        assert prompt(**more).reads_past


def test_it_owns_its_memory_without_copying_twice() -> None:
    whole = torch.randn(3, 2, 50, 8)
    one = prompt()._replace(keys=whole[:, :, :5])
    own = one.owned()
    assert torch.equal(own.keys, one.keys)
    assert own.keys.untyped_storage().nbytes() == own.keys.nbytes
    assert own.values.data_ptr() == one.values.data_ptr(), "what has memory of its own is not copied"


def test_bytes_are_those_of_every_tensor() -> None:
    keys = 3 * 2 * 5 * 8 * 4
    assert prompt().nbytes == 2 * keys
    window = WINDOW.queries.nbytes + WINDOW.at.nbytes
    forward = Forward(nn.Identity(), torch.zeros(3, 5, 16), {}, queries=torch.zeros(3, 4, 5, 8))
    more: dict[str, Any] = {
        "attn_sum": torch.zeros(3, 4, 5),
        "window": WINDOW,
        "probes": WINDOW,
        "query_absmax": torch.zeros(3, 2, 8),
        "forward": forward,
    }
    extra = 3 * 4 * 5 * 4 + 2 * window + 3 * 2 * 8 * 4 + 3 * 5 * 16 * 4 + 3 * 4 * 5 * 8 * 4
    assert prompt(VALID, **more).nbytes == 2 * keys + 15 + extra
