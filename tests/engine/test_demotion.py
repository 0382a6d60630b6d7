"""How many tokens are demoted, and how a selector ranks them; tests/conformance/test_moves.py has where they go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.engine.demotion import DemotionOrder, demoted_counts
from kvpolicy.engine.row_limits import RowLimits, alloc_limits
from kvpolicy.engine.token_batch import BEYOND
from kvpolicy.protocols import SINGLE_RANK
from tests.conformance.fakes import Fake
from tests.engine.parts import Ranking, Worth

ROWS = 2
HEADS = 2
DIM = 3


def limits_of(codec: Fake, threshold: list[int]) -> RowLimits:
    limits = alloc_limits(codec, len(threshold), HEADS, DIM, "cpu")
    assert limits is not None
    return limits._replace(flush_threshold=torch.tensor(threshold)[:, None])


@pytest.mark.parametrize("group_size", [1, 4])
def test_a_prompt_leaves_less_than_a_block_below_the_threshold(group_size: int) -> None:
    """Whole groups leave, oldest first, until fewer than a group more could."""
    codec = Fake(block=4, group_size=group_size, residual=2)
    counts = torch.tensor([[0, 5], [6, 7], [13, 40], [40, 40]])
    threshold = [6, 6, 9, BEYOND]
    moved = demoted_counts(counts, limits_of(codec, threshold), codec.traits, None)
    for b in range(len(counts)):
        for h in range(HEADS):
            left = int(counts[b, h])
            want = 0
            while left - group_size >= threshold[b] - codec.block:
                left -= group_size
                want += group_size
            assert int(moved[b, h]) == want, (b, h)
    idle = torch.tensor([False, True, True, False])
    assert demoted_counts(counts, limits_of(codec, threshold), codec.traits, idle).tolist() == [
        [0, 0] if skip else row for skip, row in zip(idle.tolist(), moved.tolist(), strict=True)
    ]


def order_of(codec: Fake, selector: Ranking, length: Tensor, budget: Tensor) -> DemotionOrder:
    limits = alloc_limits(codec, ROWS, HEADS, DIM, "cpu")
    assert limits is not None
    limits = limits._replace(flush_threshold=torch.full((ROWS, 1), 9), stage_capacity=limits.stage_capacity.fill_(5))
    return DemotionOrder(selector, codec.traits, limits, length, budget, 0, SINGLE_RANK)  # pyright: ignore[reportArgumentType]


def test_a_broken_priority_leaves_last_but_for_those_that_stay() -> None:
    positions = torch.arange(4, dtype=torch.int32).expand(ROWS, HEADS, 4)
    worth = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0]).expand(ROWS, HEADS, 4)
    order = order_of(
        Fake(block=4, residual=3, demote_by="priority"), Ranking(), torch.tensor([20, 20]), torch.tensor([9, 9])
    )
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
