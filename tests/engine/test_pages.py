"""Pages: their sizes, whose they are, and reading and choosing slots by head."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.engine.pages import (
    best_slot,
    for_pages,
    head_slots,
    lowest_of_head,
    owned_by,
    page_owners,
    page_table,
    row_pages,
    take_for_pages,
)
from kvpolicy.spec.page_sizes import fewest_tokens, page_size
from tests.reference import head_allocators

HEADS = 4


@pytest.mark.parametrize("tokens", [*range(1, 70), 100, 127, 128, 255, 256, 511, 512, 10**6])
def test_sizes_are_the_largest_of_which_a_head_has_eight(tokens: int) -> None:
    assert page_size(tokens) == head_allocators.page_size(tokens)


@pytest.mark.parametrize("tokens", [*range(1, 70), 100, 513])
def test_the_fewest_tokens_leave_an_average_head_enough(tokens: int) -> None:
    fewest = fewest_tokens(tokens)
    assert fewest // page_size(fewest) * page_size(fewest) >= tokens
    smaller = [n for n in range(4, fewest) if n // page_size(n) * page_size(n) >= tokens]
    assert not smaller


@pytest.mark.parametrize("keep", [4, 31, 32, 100, 1000])
@pytest.mark.parametrize("last", [3, 99, 100, 101, 5000])
def test_pages_of_a_row(keep: int, last: int) -> None:
    rows = row_pages(torch.tensor([keep]), torch.tensor([5]), torch.tensor([last]), HEADS)
    expected = head_allocators.room(keep, last, HEADS)
    assert (int(rows.size), int(rows.body)) == (expected.size, expected.pages)
    assert int(rows.tail) * expected.size >= 5 > (int(rows.tail) - 1) * expected.size
    if keep >= last:
        assert int(rows.body) * expected.size >= HEADS * last, "nothing is lost to rounding"
    else:
        assert int(rows.body) * expected.size <= HEADS * keep, "the budget is not exceeded"


def test_a_batch_has_the_pages_of_its_largest_row_in_the_smallest_size() -> None:
    rows = row_pages(torch.tensor([512, 33]), torch.tensor([0, 0]), torch.tensor([999, 999]), HEADS)
    assert rows.size.tolist() == [64, 4]
    assert rows.allocated(HEADS) == (512 * HEADS // 4, 4)


def counts(*pages: int) -> torch.Tensor:
    return torch.tensor([pages])


def test_owners_stand_head_by_head_and_unused_pages_last() -> None:
    assert page_owners(counts(2, 1, 0, 1), HEADS, 6).tolist() == [[0, 0, 1, 3, HEADS, HEADS]]


def test_slots_of_a_head_are_numbered_over_its_pages() -> None:
    pages = counts(2, 1, 1, 1)
    owner = page_owners(pages, HEADS, 5)
    assert head_slots(pages, owner, 2).tolist() == [[[0, 1], [2, 3], [0, 1], [0, 1], [0, 1]]]


def test_reading_by_head_is_the_inverse_of_laying_out() -> None:
    pages = torch.tensor([[1, 3, 2, 1], [2, 1, 1, 1]])
    owner = page_owners(pages, HEADS, 7)
    data = torch.arange(2 * HEADS * 12).reshape(2, HEADS, 12)
    laid = take_for_pages(data, owner, head_slots(pages, owner, 4).clamp_max(11))
    shuffled = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    table = page_table(owner[:, shuffled], HEADS)
    positions = table.occupied(laid[:, shuffled].int())
    for b in range(2):
        for h in range(HEADS):
            assert sorted(p for p in positions[b, h].tolist() if p >= 0) == data[b, h, : 4 * pages[b, h]].tolist()


def test_the_best_slot_is_the_first_of_the_largest_value() -> None:
    owner = torch.tensor([[1, 0, 1, 0, 2]])
    values = torch.tensor([[[3, 9], [7, 1], [9, 9], [7, 8], [99, 99]]])
    assert best_slot(values, owner, 2).tolist() == [[[7], [1]]]


def test_the_lowest_value_is_that_of_the_head() -> None:
    owner = torch.tensor([[1, 0, 1, 2]])
    values = torch.tensor([[[3.0, 2.0], [7.0, 1.0], [9.0, 0.5], [-4.0, -4.0]]])
    assert lowest_of_head(values, owner, 2).tolist() == [[0.5, 1.0, 0.5, float("inf")]]


def test_entries_of_heads_for_pages() -> None:
    owner = torch.tensor([[1, 0, 2]])
    assert owned_by(owner, 2).tolist() == [[[False, True, False], [True, False, False]]]
    assert for_pages(torch.tensor([[[5], [6]]]), owner).tolist() == [[[6], [5], [6]]]
