"""Free steps and slots to add, counted token by token."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest
import torch

from kvpolicy.engine.layout import (
    UNLIMITED,
    free_steps,
    growth,
    may_exceed_plan,
    merge_expected,
    slots_needed,
)

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
