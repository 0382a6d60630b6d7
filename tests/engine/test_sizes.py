"""Sizes of a layer before its prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvpolicy import AdaKV, Policy
from kvpolicy.engine.sizes import SizeHistory, Sizes, crop_obstacle
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
