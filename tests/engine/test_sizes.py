"""Sizes to which a crop returns, and when slots are ranked again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from kvpolicy import AdaKV, Policy
from kvpolicy.engine.sizes import RankSchedule, SizeHistory, Sizes, crop_obstacle
from kvpolicy.planning.memory import layer_spec


def history(*columns: int) -> SizeHistory:
    found = SizeHistory(True)
    found.entries = [Sizes(each, each + 1, each + 2, [each, 2 * each], [3, 4]) for each in columns]
    return found


@pytest.mark.parametrize(
    ("columns", "first", "left"), [(0, 0, []), (1, 4, [0]), (4, 4, [0]), (5, 9, [0, 4]), (9, 9, [0, 4])]
)
def test_the_sizes_to_return_to_are_those_of_the_earliest_change(columns: int, first: int, left: list[int]) -> None:
    sizes = history(0, 4, 9)
    found = sizes.back_to(columns)
    assert found is not None and found.columns == first
    assert [each.columns for each in sizes.entries] == left


def test_nothing_to_take_back() -> None:
    sizes = history(0, 4)
    assert sizes.back_to(5) is None and len(sizes.entries) == 2


def test_what_no_crop_reaches_is_forgotten() -> None:
    sizes = history(0, 4, 9)
    sizes.forget(4)
    assert [each.columns for each in sizes.entries] == [4, 9]


def test_rows_follow() -> None:
    sizes = history(5)
    sizes.map_rows(lambda t: t[torch.tensor([1, 1, 0])])
    assert sizes.entries[0].expected_len == [10, 10, 5] and sizes.entries[0].budget == [4, 4, 3]
    assert sizes.entries[0].columns == 5


@pytest.mark.parametrize(
    ("policy", "obstacle"),
    [
        ("snapkv@0.5", ""),
        ("window@0.5", ""),
        ("snapkv+kivi@0.5", "the codec"),
        ("snapkv+merge@0.5", "the merger"),
        ("snapkv+quest@0.5", "the reader"),
        ("h2o@0.5", "the selector"),
        ("kvzip@0.5", "the selector"),
    ],
)
def test_parts_that_cannot_be_taken_back(policy: str, obstacle: str) -> None:
    own = Policy.parse(policy)
    found = crop_obstacle(layer_spec(own, 0))
    assert found.startswith(obstacle) and bool(found) == bool(obstacle)
    assert crop_obstacle(replace(layer_spec(own, 0), heads=AdaKV())) == "budgets by head"


def run(every: int, budget: list[int], steps: int, lacks: dict[int, int] | None = None) -> list[list[int]]:
    """The lengths at which each row is ranked after prompts of 10 tokens; row r gets no token in step `lacks[r]`."""
    schedule = RankSchedule(every)
    schedule.start(len(budget))
    length = torch.full((len(budget),), 10)
    most = torch.tensor(budget)
    schedule.note(None, length, most)
    found: list[list[int]] = [[] for _ in budget]
    for step in range(steps):
        length += torch.tensor([step != (lacks or {}).get(row) for row in range(len(budget))])
        if schedule.count_step():
            due = schedule.due(length, most)
            schedule.note(due, length, most)
            for row in due.nonzero()[:, 0].tolist():
                found[row].append(int(length[row]))
    return found


def test_every_few_tokens() -> None:
    assert run(4, [20, 20], 13) == [[14, 18, 22]] * 2


def test_never() -> None:
    assert run(0, [20], 50) == [[]]


@pytest.mark.parametrize(("budget", "wait"), [(6, 3), (7, 3), (2, 1), (1, 1), (0, 1), (400, 5)])
def test_half_a_budget_at_most(budget: int, wait: int) -> None:
    assert run(5, [budget], 2 * wait) == [[10 + wait, 10 + 2 * wait]]


def test_a_row_counts_its_own_tokens() -> None:
    assert run(4, [20, 20], 9, lacks={1: 2}) == [[14, 18], [14, 18]]
    assert run(4, [20, 6], 6, lacks={1: 2}) == [[14], [13]]


def test_rows_are_selected_and_repeated() -> None:
    schedule = RankSchedule(4)
    schedule.start(2)
    schedule.note(torch.tensor([False, True]), torch.tensor([3, 7]), torch.tensor([20, 20]))
    schedule.map_rows(lambda t: t[[1, 0, 1]])
    assert schedule.ranked_len == [7, 0, 7]


@pytest.mark.parametrize("every", [0, 4])
@pytest.mark.parametrize("steps", range(5))
def test_a_restored_schedule_asks_at_the_same_steps(every: int, steps: int) -> None:
    one = RankSchedule(every)
    other = RankSchedule(every)
    for schedule in (one, other):
        schedule.start(2)
    length = torch.tensor([10, 7])
    budget = torch.tensor([20, 6])
    one.note(None, length, budget)
    asked = [one.count_step() for _ in range(steps)]
    other.set_numbers(json.loads(json.dumps(one.numbers())))
    assert other.ranked_len == one.ranked_len
    asked += [other.count_step() for _ in range(5)]
    # The second row is due after half of its budget.
    assert asked == [bool(every) and step >= 3 for step in range(1, steps + 6)]
