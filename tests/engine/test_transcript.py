"""What is noted of a prompt that is replayed, chunk by chunk, with padding anywhere."""

from __future__ import annotations

import torch

from kvpolicy.hf.transcript import extended


def test_the_next_position_is_behind_a_rows_own_tokens() -> None:
    ids = torch.arange(12).reshape(3, 4)
    valid = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0]]).bool()
    first = extended(None, ids, valid, None, 3)
    assert first.columns == 3 and first.next_position.tolist() == [7, 7, 5] and not first.positioned
    none_of_the_second = torch.tensor([[1, 1], [0, 0], [0, 1]]).bool()
    second = extended(first, ids[:, :2], none_of_the_second, None, 7)
    assert second.next_position.tolist() == [9, 7, 9] and second.columns == 3
    assert torch.equal(second.valid, torch.cat([valid, none_of_the_second], 1))


def test_positions_that_were_given_once_are_given_to_the_replay() -> None:
    ids = torch.arange(8).reshape(2, 4)
    places = torch.tensor([[5, 6, 7, 8], [0, 0, 1, 2]])
    given = extended(None, ids, None, places, 0)
    assert given.positioned and given.next_position.tolist() == [9, 3]
    assert extended(given, ids, None, None, 4).positioned
    counted = extended(None, ids, None, None, 0)
    assert extended(counted, ids, None, places[:1], 4).positioned


def test_later_changes_of_the_callers_tokens_do_not_count() -> None:
    ids = torch.arange(8).reshape(2, 4)
    valid = torch.tensor([[True] * 4, [False, False, True, True]])
    noted = extended(None, ids, valid, None, 0)
    ids.zero_()
    valid.fill_(True)
    assert noted.ids[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert noted.valid.tolist() == [[True] * 4, [False, False, True, True]]


def test_rows_are_selected_in_every_part() -> None:
    ids = torch.arange(8).reshape(2, 4)
    valid = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]).bool()
    whole = extended(extended(None, ids, valid, None, 0), ids + 8, None, torch.tensor([[4, 5, 6, 7], [2, 3, 4, 5]]), 4)
    picked = whole.map_rows(lambda t: t[[1, 0, 1]])
    assert [chunk[0].tolist() for chunk in picked.ids] == [[4, 5, 6, 7], [12, 13, 14, 15]]
    assert picked.next_position.tolist() == [6, 8, 6] and picked.valid[:, 0].tolist() == [False, True, False]
