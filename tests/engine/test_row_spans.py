"""Rows with their tokens in the same columns."""

from __future__ import annotations

import torch

from kvpolicy.engine.row_spans import columns_from, rows_by_columns


def flags(*rows: str) -> torch.Tensor:
    return torch.tensor([[letter == "x" for letter in row] for row in rows])


def test_neighbors_are_a_slice_and_others_a_list() -> None:
    found = rows_by_columns(flags("..xx", "..xx", "xxx.", "....", "..xx"))
    assert found == [([0, 1, 4], slice(2, 4)), (slice(2, 3), slice(0, 3))]
    assert rows_by_columns(flags("xx", "xx")) == [(slice(0, 2), slice(0, 2))]


def test_padding_between_tokens_leaves_a_row_alone() -> None:
    (first, span), (row, columns) = rows_by_columns(flags("xxxx", "x.xx"))
    assert (first, span, row) == (slice(0, 1), slice(0, 4), slice(1, 2))
    assert isinstance(columns, torch.Tensor) and columns.tolist() == [0, 2, 3]


def test_columns_of_a_tile() -> None:
    assert columns_from(slice(1, 5), 3) == slice(0, 2) and columns_from(slice(0, 2), 3) == slice(0, 0)
    found = columns_from(torch.tensor([0, 3, 5]), 3)
    assert isinstance(found, torch.Tensor) and found.tolist() == [0, 2]
