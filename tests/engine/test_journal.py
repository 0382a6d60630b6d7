"""Sizes to which a crop returns, and logs behind block work."""

from __future__ import annotations

import pytest
import torch

from kvpolicy import Policy
from kvpolicy.engine.journal import Content, Entry, Journal, Sizes
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.undo_log import UndoLog
from kvpolicy.planning.memory import layer_spec


def noted(*columns: int) -> Journal:
    found = LayerStore(layer_spec(Policy.parse("window@0.5"), 0)).journal
    found.sizes = [Sizes(each, each + 1, each + 2, [each, 2 * each], [3, 4]) for each in columns]
    return found


@pytest.mark.parametrize(
    ("columns", "first", "left"), [(0, 0, []), (1, 4, [0]), (4, 4, [0]), (5, 9, [0, 4]), (9, 9, [0, 4])]
)
def test_the_sizes_to_return_to_are_those_of_the_earliest_change(columns: int, first: int, left: list[int]) -> None:
    journal = noted(0, 4, 9)
    found = journal.take_sizes(columns)
    assert found is not None and found.columns == first
    assert [each.columns for each in journal.sizes] == left


def test_nothing_to_take_back() -> None:
    journal = noted(0, 4)
    assert journal.take_sizes(5) is None and len(journal.sizes) == 2


def test_what_no_crop_reaches_is_forgotten() -> None:
    journal = noted(0, 4, 9)
    journal.forget_sizes(4)
    assert [each.columns for each in journal.sizes] == [4, 9]


def test_rows_follow() -> None:
    journal = noted(5)
    journal.map_rows(lambda t: t[torch.tensor([1, 1, 0])])
    assert journal.sizes[0].expected_len == [10, 10, 5] and journal.sizes[0].budget == [4, 4, 3]
    assert journal.sizes[0].columns == 5


def test_all_bytes_of_entries_are_counted() -> None:
    target = torch.zeros(1, 1, 3, 2)
    first = UndoLog(2, {"positions": (target, 1)}, {})
    # Slots and vectors of two steps, and the counter.
    assert first.nbytes == 2 * (8 + 8) + 8
    second = UndoLog(2, {"positions": (target, 1)}, {"digest": torch.zeros(4, dtype=torch.int64)})
    assert second.nbytes == first.nbytes + 2 * 4 * 8
    before = Content({"keys": torch.zeros(5), "codes": ((torch.zeros(2),),)}, {"capacity": 3}, [])
    journal = noted()
    journal.entries = [Entry(first), Entry(second, 1, 1, before)]
    assert journal.nbytes == first.nbytes + second.nbytes + 28
