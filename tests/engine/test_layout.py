"""Buffers that grow with a layout, and when they must grow."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest
import torch

from kvpolicy.engine.layout import (
    UNLIMITED,
    cleared,
    fix_addresses,
    free_steps,
    grown_codes,
    grown_layout,
    grown_slots,
    grown_state,
    growth,
    may_exceed_plan,
    merge_expected,
    slots_needed,
)
from kvpolicy.engine.state import tensors
from kvpolicy.protocols import Layout
from tests.conformance.fakes import Fake
from tests.engine.parts import Worth, generator

LAYOUTS = [Layout(0), Layout(1), Layout(5), Layout(3, (4,)), Layout(6, (2,)), Layout(2, (0, 7)), Layout(2, (3, 1))]


def test_a_layout_is_the_larger_one_stage_by_stage() -> None:
    for old, wanted in itertools.product(LAYOUTS, LAYOUTS):
        grown = grown_layout(old, wanted)
        assert grown.exact == max(old.exact, wanted.exact)
        for stage in range(3):
            sizes = [layout.coded[stage] if stage < len(layout.coded) else 0 for layout in (old, wanted, grown)]
            assert sizes[2] == max(sizes[:2])
        assert grown_layout(grown, old) == grown_layout(grown, wanted) == grown


@pytest.mark.parametrize("reserved", [0, 1, 3])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Layout(4), Layout(4)),
        (Layout(4), Layout(9, (2,))),
        (Layout(4, (3, 2)), Layout(5, (3, 6))),
        (Layout(4, (0, 2)), Layout(4, (1, 2))),
    ],
)
def test_slots_are_carried_over(old: Layout, new: Layout, reserved: int) -> None:
    """Slots of the stages and dictionary slots keep their tokens; the other full-precision slots come out empty."""
    positions = torch.randint(0, 99, (2, 3, old.slots), generator=generator(1)).to(torch.int32)
    state = Worth(positions.float() / 2, positions.long() * 3)
    got, got_state = grown_slots(positions, state, old, new, reserved)
    want = torch.full((2, 3, new.slots), -1, dtype=torch.int32)
    want[..., :reserved] = positions[..., :reserved]
    for stage, size in enumerate(old.coded):
        for slot in range(size):
            want[..., new.starts()[stage] + slot] = positions[..., old.starts()[stage] + slot]
    assert got.dtype == torch.int32 and got.tolist() == want.tolist()
    carried = want >= 0
    assert got_state.worth.tolist() == want.div(2).where(carried, 0.0).tolist()
    assert got_state.number.tolist() == want.long().mul(3).where(carried, 0).tolist()
    assert grown_state(positions * 2, old, new, reserved).tolist() == want.mul(2).where(carried, 0).tolist()
    assert grown_state((), old, new, reserved) == ()


def test_codes_are_carried_over() -> None:
    codec = Fake(caps=(4,), block=2, group_size=2)
    old = tuple(stage.alloc(2, 3, 4, 5, "cpu") for stage in codec.stages[:1])
    for number, t in enumerate(tensors(old)):
        t.copy_(torch.randn(t.shape, generator=generator(number)))
    before = [t.clone() for t in tensors(old)]
    grown = grown_codes(codec, old, (6, 2), (2, 3, 5), torch.device("cpu"))
    assert len(grown) == 2 and type(grown[0]) is type(old[0])
    for source, target in zip(before, tensors(grown[0]), strict=True):
        assert torch.equal(target[:, :, : source.shape[2]], source)
        assert not target[:, :, source.shape[2] :].any()
    fresh = codec.stages[1].alloc(2, 3, 2, 5, "cpu")
    for target, empty in zip(tensors(grown[1]), tensors(fresh), strict=True):
        assert torch.equal(target, empty)
    assert not grown_codes(codec, (), (), (2, 3, 5), torch.device("cpu"))


def test_addresses_are_fixed_without_a_guard() -> None:
    """A guard would compile the step again for every cache."""
    parts = [torch.zeros(2), Worth(torch.zeros(1), torch.zeros(1)), ()]
    fix_addresses(parts)
    marks = [getattr(t, "_dynamo_static_input_type", None) for part in parts for t in tensors(part)]
    assert marks == ["unguarded"] * 3


def test_a_cleared_state_is_zero_where_the_mask_is_set() -> None:
    state = Worth(torch.full((1, 2, 3), 5.0), torch.full((1, 2, 3), 7))
    mask = torch.tensor([[[True, False, False], [False, False, True]]])
    got = cleared(state, mask)
    assert got.worth.tolist() == [[[0, 5, 5], [5, 5, 0]]] and got.number.tolist() == [[[0, 7, 7], [7, 7, 0]]]
    assert state.worth.min() == 5, "the old state stays"


FOREVER = 1000
"""More steps than any case below has room for."""


def steps_of_a_head(held: int, budget: int, expected: int, grows: bool, room: int | None) -> int:
    """Steps that one head can take: it adds a token, or evicts one in place."""
    for step in range(FOREVER):
        if room is not None and step >= room:
            return step
        if grows and held >= min(budget, expected):
            return step
        if not grows and held < budget and held >= expected:
            return step
        held += grows or held < budget
    return FOREVER


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("staged", [False, True])
def test_free_steps_are_those_of_the_head_with_the_fewest(grows: bool, staged: bool) -> None:
    for seed in range(40):
        dice = Random(seed)
        rows = dice.randint(1, 3)
        heads = dice.randint(1, 3)
        budget = [dice.randint(1, 12) for _ in range(rows)]
        expected = [dice.randint(1, 12) for _ in range(rows)]
        held = [[dice.randint(0, min(pair)) for _ in range(heads)] for pair in zip(budget, expected, strict=True)]
        room = [[dice.randint(0, 5) for _ in range(heads)] for _ in range(rows)] if staged else None
        want = min(
            steps_of_a_head(held[b][h], budget[b], expected[b], grows, room[b][h] if room else None)
            for b, h in itertools.product(range(rows), range(heads))
        )
        buffer_room = None if room is None else torch.tensor(room)
        got = free_steps(torch.tensor(held), torch.tensor(budget), expected, grows=grows, buffer_room=buffer_room)
        assert min(got, FOREVER) == want, seed


def test_growth_is_an_eighth_between_two_bounds() -> None:
    counts = [0, 1, 127, 128, 129, 136, 2047, 2048, 2056, 10**6]
    assert growth(torch.tensor(counts)).tolist() == [min(max(count // 8, 16), 256) for count in counts]


def test_slots_are_added_where_the_next_step_has_none() -> None:
    dice = Random(0)
    rows = 200
    budget = [dice.randint(1, 400) for _ in range(rows)]
    expected = [dice.randint(1, 400) for _ in range(rows)]
    held = [dice.choice([expected[row], dice.randint(0, 400)]) for row in range(rows)]
    added = slots_needed(expected, budget, held, grows=False)
    for most, slots, count, more in zip(budget, expected, held, added, strict=True):
        step = min(max(count // 8, 16), 256)
        # A row that is at its budget evicts, and one with a slot left writes there.
        assert more == (min(step, most - slots) if slots <= count < most else 0)
        assert more >= 0 and slots + more <= max(most, slots)


def test_a_growing_row_has_slots_for_the_next_steps() -> None:
    """Whether its budget ends first, as behind a short announcement, or its slots do, as behind a short prompt."""
    dice = Random(0)
    for _ in range(60):
        slots = dice.randint(1, 400)
        budget = dice.randint(1, 400)
        held = dice.choice([min(slots, budget), dice.randint(0, min(slots, budget))])
        (added,) = slots_needed([slots], [budget], [held], grows=True)
        if held < min(slots, budget):
            assert added == 0
        else:
            step = min(max(held // 8, 16), 256)
            assert slots + added >= held + step and (added == 0 or slots + added == held + step)


def test_a_plan_is_exceeded_by_any_row() -> None:
    assert not may_exceed_plan([3, 5], [3, 4])
    assert may_exceed_plan([3, 5], [3, 6])
    assert not may_exceed_plan([], [])


def test_expected_lengths_only_rise_and_idle_rows_keep_theirs() -> None:
    assert merge_expected([3, 9, 4], [5, 2, 8], None) == [5, 9, 8]
    assert merge_expected([3, 9, 4], [5, 2, 8], [False, False, True]) == [5, 9, 4]


def test_unlimited_is_more_than_any_count() -> None:
    assert math.inf == UNLIMITED and UNLIMITED - 10**9 >= 1
