"""Every read of a step is counted, and nothing else."""

from __future__ import annotations

import torch

from kvpolicy.engine.link import Link
from tests.engine.parts import Floats


def test_counts_between_start_and_stop() -> None:
    link = Link()
    source = torch.arange(24.0).view(1, 2, 4, 3)
    link.whole(source)
    assert link.moved == 0
    link.start()
    got = link.rows(source, torch.tensor([[[3, 0], [1, 1]]]))
    assert torch.equal(got[0, 0], source[0, 0, [3, 0]]) and torch.equal(got[0, 1], source[0, 1, [1, 1]])
    assert link.moved == 2 * 2 * 3 * 4
    link.whole((source, (source,)))
    assert link.moved == 48 + 2 * 96
    link.stop()
    link.whole(source)
    assert link.moved == 48 + 2 * 96
    link.start()
    assert link.moved == 0


def test_a_stage_is_counted_by_slots_and_by_groups() -> None:
    per_slot = torch.zeros(1, 2, 8, 4)
    per_group = torch.zeros(1, 2, 2, 4)
    whole = torch.zeros(1, 2, 1, 4)
    for page, groups in ((1, 2), (4, 1)):
        link = Link()
        link.start()
        link.count_stage(Floats(per_slot, per_group, whole), 8, 3, 4, page)
        assert link.moved == 4 * (2 * 3 * 4 + 2 * groups * 4 + 2 * 4)


def test_a_layer_without_slots_moves_nothing() -> None:
    link = Link()
    link.start()
    link.count_rows(torch.zeros(1, 2, 0, 4), 3)
    assert link.moved == 0


def test_a_plan_counts_without_memory() -> None:
    link = Link()
    link.start()
    link.whole(torch.empty(1 << 40, device="meta", dtype=torch.int8))
    assert link.moved == 1 << 40
