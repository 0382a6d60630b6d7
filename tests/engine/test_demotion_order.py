"""Which tokens are demoted first, against a sort of each head by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.engine.demotion import DemotionOrder
from kvpolicy.engine.row_limits import alloc_limits
from kvpolicy.protocols import SINGLE_RANK, Traits
from tests.conformance.fakes import Fake
from tests.engine.parts import Ranking, Worth, generator, shuffled

ROWS = 2
HEADS = 3
COUNT = 9
MOST = 20
BY_AGE = Fake(block=4, residual=3)
BY_PRIORITY = Fake(block=4, residual=3, demote_by="priority")


def order_of(codec: Fake, selector: Ranking, length: Tensor, budget: Tensor) -> DemotionOrder:
    limits = alloc_limits(codec, ROWS, HEADS, 8, "cpu")
    assert limits is not None
    limits = limits._replace(flush_threshold=torch.full((ROWS, 1), 9), stage_capacity=limits.stage_capacity.fill_(5))
    if codec.pinned:
        limits.pins.copy_(torch.tensor([0, 5]))
    return DemotionOrder(selector, codec.traits, limits, length, budget, 0, SINGLE_RANK)  # pyright: ignore[reportArgumentType]


def slow_order(traits: Traits, positions: list[int], worth: list[float], there: list[bool], length: int) -> list[int]:
    """The tokens of one head that are there, sorted by what the rules say."""

    def key(j: int) -> tuple[float, ...]:
        stays = traits.pinned > 0 and positions[j] in (0, 5)
        if traits.demotion is None:
            return (stays, positions[j])
        stays = stays or positions[j] >= length - traits.residual
        return (stays, worth[j], -positions[j])  # of equal ones, the later token leaves first

    return sorted((j for j in range(len(positions)) if there[j]), key=key)


@pytest.mark.parametrize("levels", [1, 2, 50], ids=lambda levels: f"{levels} levels of worth")
@pytest.mark.parametrize("pinned", [0, 2])
@pytest.mark.parametrize("demote_by", ["age", "priority"])
def test_every_head_is_sorted_by_itself(demote_by: str, pinned: int, levels: int) -> None:
    pins = {"pins": "first", "pinned": 2} if pinned else {}
    codec = Fake(block=4, residual=3, demote_by=demote_by, **pins)  # pyright: ignore[reportArgumentType]
    positions = shuffled(COUNT, rows=ROWS, heads=HEADS, most=MOST, seed=levels)
    positions[0, 0, 4] = 0
    dice = generator(levels)
    worth = torch.randint(levels, positions.shape, generator=dice).float()
    there = torch.rand(positions.shape, generator=dice) < 0.7
    there[1, 0] = False
    there[1, 1, 1:] = False
    length = torch.tensor([MOST, 12])
    order = order_of(codec, Ranking(), length, torch.tensor([COUNT, COUNT]))
    got = order.indices(positions.where(there, -1), Worth(worth, worth.long()), there)
    for b in range(ROWS):
        for h in range(HEADS):
            count = int(there[b, h].sum())
            values = positions[b, h].tolist(), worth[b, h].tolist(), there[b, h].tolist()
            assert got[b, h, :count].tolist() == slow_order(codec.traits, *values, int(length[b])), (b, h)
            assert sorted(got[b, h].tolist()) == [*range(COUNT)], "every token has one place"


def test_a_broken_priority_leaves_last_but_for_those_that_stay() -> None:
    positions = torch.arange(4, dtype=torch.int32).expand(ROWS, HEADS, 4)
    worth = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0]).expand(ROWS, HEADS, 4)
    order = order_of(BY_PRIORITY, Ranking(), torch.tensor([20, 20]), torch.tensor([9, 9]))
    got = order.indices(positions, Worth(worth, worth.long()), torch.ones_like(positions, dtype=torch.bool))
    assert got[0, 0].tolist() == [2, 3, 0, 1]


@pytest.mark.parametrize(
    ("caps", "min_tokens", "budget", "precise"), [((), 1, 9, 5), ((5,), 1, 30, 10), ((5,), 1, 7, 7), ((), 8, 9, 8)]
)
def test_the_selector_ranks_for_the_tokens_that_stay_precise(
    caps: tuple[int, ...], min_tokens: int, budget: int, precise: int
) -> None:
    """Below the threshold of 9 a block of 4 is demoted; the first of two stages, of 5 slots, is precise too."""
    selector = Ranking(min_tokens=min_tokens)
    codec = Fake(caps=caps, block=4, demote_by="priority")
    order = order_of(codec, selector, torch.tensor([20, 20]), torch.tensor([budget, budget]))
    positions = torch.tensor([3, -1, 7], dtype=torch.int32).expand(ROWS, HEADS, 3)
    there = torch.tensor([True, True, False]).expand(ROWS, HEADS, 3)
    order.indices(positions, Worth(torch.zeros(ROWS, HEADS, 3), positions.long()), there)
    (view,) = selector.views
    assert view.budget.tolist() == [precise, precise]
    assert view.positions[0, 0].tolist() == [3, -1, -1], "what is no candidate is no token"


def test_age_asks_no_selector() -> None:
    selector = Ranking()
    order = order_of(BY_AGE, selector, torch.tensor([20, 20]), torch.tensor([9, 9]))
    order.indices(torch.zeros(ROWS, HEADS, 1, dtype=torch.int32), (), torch.ones(ROWS, HEADS, 1, dtype=torch.bool))
    assert not selector.views
