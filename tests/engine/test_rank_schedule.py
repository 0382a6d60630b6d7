"""When slots are ranked again."""

from __future__ import annotations

import json

import pytest
import torch

from kvpolicy.engine.rank_schedule import RankSchedule


def counted(schedule: RankSchedule) -> bool:
    """Count a step; whether a row may be due."""
    schedule.steps -= 1
    return schedule.steps < 1


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
        if counted(schedule):
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
    asked = [counted(one) for _ in range(steps)]
    other.set_numbers(json.loads(json.dumps(one.numbers())))
    assert other.ranked_len == one.ranked_len
    asked += [counted(other) for _ in range(5)]
    # The second row is due after half of its budget.
    assert asked == [bool(every) and step >= 3 for step in range(1, steps + 6)]


def test_a_row_that_becomes_shorter_was_ranked_at_its_beginning_at_the_earliest() -> None:
    schedule = RankSchedule(4)
    schedule.start(3)
    schedule.note(torch.tensor([False, True, True]), torch.tensor([9, 3, 9]), torch.tensor([20, 20, 20]))
    schedule.move(-5)
    assert schedule.ranked_len == [0, 0, 4]
