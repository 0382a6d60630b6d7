"""Pages: their sizes and numbers, and the slots that are chosen of a head's."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.engine.pages import Owners, best_slot, first_free, lowest_of_head, row_pages, write_pages
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


def test_the_best_slot_is_the_first_of_the_largest_value() -> None:
    owner = torch.tensor([[1, 0, 1, 0, 2]])
    values = torch.tensor([[[3, 9], [7, 1], [9, 9], [7, 8], [99, 99]]])
    assert best_slot(values, Owners.of(owner, 2, ALONE.once)).tolist() == [[[7], [1]]]


def test_the_lowest_value_is_that_of_the_head() -> None:
    owner = torch.tensor([[1, 0, 1, 2]])
    values = torch.tensor([[[3.0, 2.0], [7.0, 1.0], [9.0, 0.5], [-4.0, -4.0]]])
    assert lowest_of_head(values, Owners.of(owner, 2, ALONE.once)).tolist() == [[0.5, 1.0, 0.5, float("inf")]]


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
