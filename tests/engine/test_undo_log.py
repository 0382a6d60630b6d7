"""The log of a few steps, on tensors without a layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.engine.undo_log import UndoLog
from kvpolicy.kernels.slot_writes import write_slots

STEPS = 4


def steps(log: UndoLog, target: Tensor, copied: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    """Random steps, which may write a slot again; what both tensors were before each, and at the end."""
    dice = torch.Generator().manual_seed(0)
    seen = [(target.clone(), copied.clone())]
    for _ in range(count):
        slots = torch.randint(0, target.shape[2], (*target.shape[:2], 1), generator=dice)
        slots = torch.cat([slots, slots], -1)  # twice, as a merge that merges nothing
        log.begin({"copied": copied})
        log.record("positions", target, slots)
        data = torch.randn(*target.shape[:2], 1, *target.shape[3:], generator=dice)
        write_slots(target, slots, torch.cat([data, data], 2))
        copied.add_(1.7)
        log.end()
        seen.append((target.clone(), copied.clone()))
    return seen


@pytest.mark.parametrize("keep", range(STEPS + 1))
def test_undone_steps_leave_no_trace(keep: int) -> None:
    target = torch.randn(2, 3, 2, 5)
    copied = torch.randn(2)
    log = UndoLog(STEPS, {"positions": (target, 2)}, {"copied": copied})
    seen = steps(log, target, copied, STEPS)
    assert len(log.undo(keep, {"positions": (target, 2)}, {"copied": copied})) == STEPS - keep
    assert torch.equal(target, seen[keep][0]) and torch.equal(copied, seen[keep][1])


def test_a_full_log_takes_no_step() -> None:
    target = torch.zeros(1, 1, 3, 2)
    log = UndoLog(1, {"positions": (target, 1)}, {})
    log.begin({})
    log.end()
    with pytest.raises(RuntimeError, match="more steps than the mark allows"):
        log.begin({})
