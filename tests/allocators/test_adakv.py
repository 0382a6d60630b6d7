"""AdaKV: how many of each head's tokens are among the best of a layer."""

from __future__ import annotations

import random

import pytest
import torch

from kvpolicy.allocators.adakv import AdaKV
from kvpolicy.protocols import HeadRequest, View
from tests.reference.head_allocators import Room, divide


def request(worths: list[list[list[float]]], pages: list[int], size: list[int], most: list[int]) -> HeadRequest:
    """What is divided, given what the tokens of each row and head are worth; heads may hold different numbers."""
    count = max(len(head) for row in worths for head in row)
    priority = torch.tensor([[[-torch.inf] * (count - len(head)) + head for head in row] for row in worths])
    positions = torch.arange(count, dtype=torch.int32).expand_as(priority).masked_fill(priority == -torch.inf, -1)
    length = torch.full((len(worths),), count)
    view = View(positions, length, torch.tensor(pages) // len(worths[0]) * torch.tensor(size), 0)
    return HeadRequest(priority, view, torch.tensor(pages), torch.tensor(size), torch.tensor(most))


@pytest.mark.parametrize("safeguard", [0.0, 0.07, 0.29, 0.58, 0.9, 1.0])
def test_every_layer_is_divided_as_by_the_slow_version(safeguard: float) -> None:
    """Also where a head holds fewer tokens than its safe part, and where tokens tie."""
    dice = random.Random(3)
    for _ in range(60):
        heads = dice.choice([1, 2, 3])
        worths = [
            [[dice.randint(0, 9) / 8 for _ in range(dice.randint(3, 40))] for _ in range(heads)] for _ in range(2)
        ]
        size = [dice.choice([4, 8]) for _ in worths]
        pages = [heads * dice.randint(1, 6) + dice.randrange(heads) for _ in worths]
        most = [max(-(-40 // each), count // heads) for each, count in zip(size, pages, strict=True)]
        found = AdaKV(safeguard=safeguard).divide(request(worths, pages, size, most))
        rooms = [Room(*row) for row in zip(size, pages, [0, 0], most, strict=True)]
        want = [divide("adakv", {"safeguard": safeguard}, *row) for row in zip(worths, rooms, strict=True)]
        assert found.tolist() == want


def test_a_safe_part_is_not_rounded_down_by_a_floating_point_error() -> None:
    """0.29 * 200 / 2 is 29, and slightly less in floating point; the tokens of the second head are worth more."""
    given = request([[[0.0] * 200, [1.0] * 200]], pages=[200], size=[1], most=[200])
    assert AdaKV(safeguard=0.29).divide(given).tolist() == [[29, 171]]


def test_every_head_has_room_for_what_any_head_must_keep() -> None:
    """Representatives, of which heads may have different numbers; the first head is worth one page."""
    must = [torch.inf] * 9
    given = request([[[0.0] * 40, [*must, *[1.0] * 31]]], pages=[10], size=[4], most=[10])
    assert AdaKV(safeguard=0.0).divide(given).tolist() == [[3, 7]]
