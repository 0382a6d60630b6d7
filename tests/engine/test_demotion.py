"""How many tokens are demoted, and into which slots, against lists of slots."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from kvpolicy.engine.demotion import DemotionOrder, demoted_counts, free_slots, overflow
from kvpolicy.engine.row_limits import RowLimits, alloc_limits
from kvpolicy.engine.token_batch import BEYOND, TokenBatch
from kvpolicy.protocols import SINGLE_RANK, StageStore
from tests.conformance.fakes import Fake
from tests.engine.parts import Floats, Ranking, Uncoded, Worth, generator, shuffled

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


def slow_free_slots(occupied: list[bool], capacity: int, group_size: int) -> list[int]:
    """Free slots that a row may use, those of the emptiest group first."""
    groups = [range(start, start + group_size) for start in range(0, len(occupied), group_size)]
    crowd = {slot: sum(occupied[other] for other in group) for group in groups for slot in group}
    free = [slot for slot in range(capacity) if not occupied[slot]]
    return sorted(free, key=lambda slot: (crowd[slot], slot))


@pytest.mark.parametrize(("group_size", "seed"), [(1, 0), (1, 1), (2, 2), (2, 3), (4, 4), (4, 5)])
def test_tokens_go_to_the_emptiest_group(group_size: int, seed: int) -> None:
    dice = Random(seed)
    slots = group_size * dice.randint(1, 4)
    capacity = [dice.randint(0, slots) for _ in range(ROWS)]
    taken = [
        [[slot < capacity[b] and dice.random() < 0.5 for slot in range(slots)] for _ in range(HEADS)]
        for b in range(ROWS)
    ]
    positions = torch.where(torch.tensor(taken), 7, -1)
    got = free_slots(positions, torch.tensor(capacity), group_size)
    for b in range(ROWS):
        for h in range(HEADS):
            want = slow_free_slots(taken[b][h], capacity[b], group_size)
            assert got[b, h, : len(want)].tolist() == want
            rest = got[b, h, len(want) :].tolist()
            assert {*want, *rest} == {*range(slots)}
            used = [slot for slot in rest if slot < capacity[b]]
            assert rest[: len(used)] == used, "what only other rows may use comes last"


def block_of(positions: Tensor, chosen: Tensor) -> TokenBatch:
    keys = positions[..., None].expand(*positions.shape, DIM).float()
    return TokenBatch(keys, -keys, positions, Worth(keys[..., 0], positions.long()), chosen)


@pytest.mark.parametrize("seed", range(12))
def test_what_a_stage_has_no_slot_for_moves_on(seed: int) -> None:
    """The oldest tokens of the stage leave, then the first ones of the block."""
    dice = Random(seed)
    order_dice = generator(seed)
    slots = dice.randint(1, 6)
    width = dice.randint(1, 5)
    capacity = [dice.randint(0, slots) for _ in range(ROWS)]
    held = shuffled(slots, rows=ROWS, heads=HEADS, most=50, seed=seed)
    usable = torch.arange(slots) < torch.tensor(capacity)[:, None, None]
    held = held.where((torch.rand(held.shape, generator=order_dice) < 0.7) & usable, -1)
    new = 50 + shuffled(width, rows=ROWS, heads=HEADS, most=50, seed=seed).sort(-1).values
    chosen = torch.rand(new.shape, generator=order_dice) < 0.8
    codec = Fake(block=width)
    order = DemotionOrder(
        Ranking(),
        codec.traits,
        limits_of(codec, [9] * ROWS),
        torch.tensor([99] * ROWS),
        torch.tensor([99] * ROWS),
        0,
        SINGLE_RANK,
    )  # pyright: ignore[reportArgumentType]
    given = block_of(held, held >= 0)
    store = StageStore(Floats(given.keys, given.values, torch.zeros(1)))
    got = overflow(Uncoded(), store, held, given.state, torch.tensor(capacity), block_of(new, chosen), order)
    for b in range(ROWS):
        for h in range(HEADS):
            inside = sorted(p for p in held[b, h].tolist() if p >= 0)
            coming = new[b, h][chosen[b, h]].tolist()
            lack = max(len(coming) - (capacity[b] - len(inside)), 0)
            leaving = inside[:lack]
            passing = coming[: lack - len(leaving)]
            emptied = got.slots[b, h][got.leaves[b, h]].tolist()
            assert sorted(held[b, h, emptied].tolist()) == leaving
            moving = got.batch.chosen[b, h]
            assert got.batch.positions[b, h][moving].tolist() == leaving + passing
            for side, sign in ((got.batch.keys, 1), (got.batch.values, -1)):
                assert side[b, h][moving][:, 0].tolist() == [sign * p for p in leaving + passing]
            assert got.batch.state.number[b, h][moving].tolist() == leaving + passing
            assert new[b, h][got.stays[b, h]].tolist() == coming[len(passing) :]
