"""Pages: their sizes, whose they are, and reading and choosing slots by head."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.engine.pages import (
    Owners,
    as_pages,
    best_slot,
    buffer_pages,
    first_free,
    for_pages,
    from_pages,
    head_slots,
    lowest_of_head,
    owned_by,
    page_owners,
    page_table,
    place_tokens,
    row_pages,
    take_for_pages,
    write_pages,
)
from kvpolicy.protocols import ALONE
from kvpolicy.text.budget import fewest_tokens, page_size
from tests.reference import head_allocators

HEADS = 4


def test_sizes_are_the_largest_of_which_a_head_has_eight() -> None:
    for tokens in [*range(1, 70), 100, 127, 128, 255, 256, 511, 512, 10**6]:
        assert page_size(tokens) == head_allocators.page_size(tokens), tokens


def test_the_fewest_tokens_leave_an_average_head_enough() -> None:
    for tokens in [*range(1, 70), 100, 513]:
        fewest = fewest_tokens(tokens)
        enough = [n for n in range(4, fewest + 1) if n // page_size(n) * page_size(n) >= tokens]
        assert enough == [fewest], tokens


@pytest.mark.parametrize("keep", [4, 31, 32, 100, 1000])
def test_pages_of_a_row(keep: int) -> None:
    for last in (3, 99, 100, 101, 5000):
        rows = row_pages(torch.tensor([keep]), torch.tensor([5]), torch.tensor([last]), HEADS)
        expected = head_allocators.room(keep, last, HEADS)
        assert (int(rows.size), int(rows.body)) == (expected.size, expected.pages), last
        assert int(rows.tail) * expected.size >= 5 > (int(rows.tail) - 1) * expected.size, last
        if keep >= last:
            assert int(rows.body) * expected.size >= HEADS * last, "nothing is lost to rounding"
        else:
            assert int(rows.body) * expected.size <= HEADS * keep, "the budget is not exceeded"


def test_a_batch_has_the_pages_of_its_largest_row_in_the_smallest_size() -> None:
    for keep in ([512, 33], [33, 512]):
        rows = row_pages(torch.tensor(keep), torch.tensor([0, 0]), torch.tensor([999, 999]), HEADS)
        assert rows.size.tolist() == [64 if tokens == 512 else 4 for tokens in keep]
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
    assert best_slot(values, Owners.of(owner, 2, ALONE.once)).tolist() == [[[7], [1]]]


def test_the_lowest_value_is_that_of_the_head() -> None:
    owner = torch.tensor([[1, 0, 1, 2]])
    values = torch.tensor([[[3.0, 2.0], [7.0, 1.0], [9.0, 0.5], [-4.0, -4.0]]])
    assert lowest_of_head(values, Owners.of(owner, 2, ALONE.once)).tolist() == [[0.5, 1.0, 0.5, float("inf")]]


def test_entries_of_heads_for_pages() -> None:
    owner = torch.tensor([[1, 0, 2]])
    assert owned_by(owner, 2).tolist() == [[[False, True, False], [True, False, False]]]
    assert for_pages(torch.tensor([[[5], [6]]]), owner).tolist() == [[[6], [5], [6]]]


@pytest.mark.parametrize("slots", [1, 3, 4, 9])
def test_a_buffer_appears_as_whole_pages(slots: int) -> None:
    buffer = torch.arange(2 * HEADS * slots).view(2, HEADS, slots)
    pages = as_pages(buffer, 4, -1)
    assert pages.shape == (2, HEADS * buffer_pages(slots, 4), 4)
    assert (pages == -1).sum() == 2 * HEADS * (-slots % 4)
    assert torch.equal(from_pages(pages, HEADS, slots), buffer)


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_written_to_the_first_empty_slots_of_their_head(seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    owner = torch.randint(HEADS + 1, (2, 9), generator=dice)
    positions = torch.randint(-1, 2, (2, 9, 4), generator=dice).to(torch.int32)
    count = 5
    slots = first_free(positions, owner, HEADS, count)
    mask = torch.zeros(2, HEADS, count, dtype=torch.bool)
    expected = positions.clone()
    data = torch.arange(100, 100 + mask.numel(), dtype=torch.int32).view(mask.shape)
    for b in range(2):
        for head in range(HEADS):
            free = [
                (page, slot)
                for page in range(9)
                for slot in range(4)
                if int(owner[b, page]) == head and int(positions[b, page, slot]) < 0
            ]
            assert slots[b, head].tolist() == ([4 * page + slot for page, slot in free] + [0] * count)[:count]
            for number, (page, slot) in enumerate(free[: min(count, 1 + head)]):
                mask[b, head, number] = True
                expected[b, page, slot] = data[b, head, number]
    write_pages(positions, slots, data, mask)
    assert torch.equal(positions, expected)


def test_tokens_are_laid_out_by_position() -> None:
    positions = torch.tensor([[[7, 2, 5, -1, 9], [1, 0, 3, 4, 8]]])
    chosen = torch.tensor([[[True, True, False, False, True], [True, True, True, True, True]]])
    placed = place_tokens(positions, chosen, torch.tensor([[1, 2]]), 4)
    assert placed.owner.tolist() == [[0, 1, 1]]
    found = placed.take(positions).masked_fill(placed.empty, -1)
    assert found.tolist() == [[[2, 7, 9, -1], [0, 1, 3, 4], [8, -1, -1, -1]]]
