"""What a layer counts on the host, and what moves when its slots grow: steps, limits, rankings and demoted tokens."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.codecs.plain import Plain
from kvpolicy.codecs.tokenwise import TokenWise
from kvpolicy.engine.demotion import DemotionOrder, demoted_counts
from kvpolicy.engine.editing import note_move
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.layout import (
    fix_addresses,
    free_steps,
    grown_layout,
    grown_slots,
    grown_state,
    merge_expected,
    slots_needed,
)
from kvpolicy.engine.rank_schedule import RankSchedule
from kvpolicy.engine.row_limits import RowLimits, alloc_limits, has_dictionary, with_tokens
from kvpolicy.engine.state import tensors
from kvpolicy.engine.token_batch import BEYOND, SlotData, with_dictionary
from kvpolicy.protocols import SINGLE_RANK, Layout, View, traits_for
from kvpolicy.statistics import Results
from tests.conformance.fakes import Fake
from tests.engine.parts import Ranking, Worth, generator, prompted_store
from tests.readers.bench import draw
from tests.sampling import product

FOREVER = 1000
"""More steps than any case below has room for."""


def steps_of_a_head(held: int, budget: int, expected: int, grows: bool, room: int | None) -> int:
    """Steps that one head can take: it adds a token, or evicts one in place."""
    for step in range(FOREVER):
        if room is not None and step >= room:
            return step
        if grows and held >= min(budget, expected):
            return step
        if not grows and held < budget and held >= expected:
            return step
        held += grows or held < budget
    return FOREVER


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("staged", [False, True])
def test_free_steps_are_those_of_the_head_with_the_fewest(grows: bool, staged: bool) -> None:
    for seed in range(40):
        dice = Random(seed)
        rows = dice.randint(1, 3)
        heads = dice.randint(1, 3)
        budget = [dice.randint(1, 12) for _ in range(rows)]
        expected = [dice.randint(1, 12) for _ in range(rows)]
        held = [[dice.randint(0, min(pair)) for _ in range(heads)] for pair in zip(budget, expected, strict=True)]
        room = [[dice.randint(0, 5) for _ in range(heads)] for _ in range(rows)] if staged else None
        want = min(
            steps_of_a_head(held[b][h], budget[b], expected[b], grows, room[b][h] if room else None)
            for b, h in itertools.product(range(rows), range(heads))
        )
        buffer_room = None if room is None else torch.tensor(room)
        got = free_steps(torch.tensor(held), torch.tensor(budget), expected, grows=grows, buffer_room=buffer_room)
        assert min(got, FOREVER) == want, seed


def test_slots_are_added_where_the_next_step_has_none() -> None:
    dice = Random(0)
    rows = 200
    budget = [dice.randint(1, 400) for _ in range(rows)]
    expected = [dice.randint(1, 400) for _ in range(rows)]
    held = [dice.choice([expected[row], dice.randint(0, 400)]) for row in range(rows)]
    added = slots_needed(expected, budget, held, grows=False)
    for most, slots, count, more in zip(budget, expected, held, added, strict=True):
        step = min(max(count // 8, 16), 256)
        # A row that is at its budget evicts, and one with a slot left writes there.
        assert more == (min(step, most - slots) if slots <= count < most else 0)
        assert more >= 0 and slots + more <= max(most, slots)


def test_a_growing_row_has_slots_for_the_next_steps() -> None:
    """Whether its budget ends first, as behind a short announcement, or its slots do, as behind a short prompt."""
    dice = Random(0)
    for _ in range(60):
        slots = dice.randint(1, 400)
        budget = dice.randint(1, 400)
        held = dice.choice([min(slots, budget), dice.randint(0, min(slots, budget))])
        (added,) = slots_needed([slots], [budget], [held], grows=True)
        if held < min(slots, budget):
            assert added == 0
        else:
            step = min(max(held // 8, 16), 256)
            assert slots + added >= held + step and (added == 0 or slots + added == held + step)


PROMPT = 12


@dataclass(kw_only=True)
class RankingAgain(Ranking):
    """Ranks all slots again after four tokens."""

    rerank_every: int = 4

    def rerank(self, state: Worth, seen: Results, view: View) -> Worth:
        return state


@pytest.mark.parametrize("by", [5, -3])
def test_a_move_neither_hastens_nor_delays_the_next_ranking(by: int) -> None:
    selector: Any = RankingAgain()
    store = prompted_store(selector, draw(PROMPT, 1), PROMPT)
    note_move(store, by)
    assert store.tensors.length.tolist() == [PROMPT + by] and int(store.tensors.columns) == PROMPT + by
    due = [bool(store.contents.schedule.due(store.tensors.length + more, store.tensors.budget)) for more in range(6)]
    assert due == [False] * 4 + [True] * 2


def test_more_slots_leave_a_larger_budget_as_it_is() -> None:
    """A budget may exceed all tokens that were announced: slots follow as they come."""
    selector: Any = Ranking(decode="grow")
    store = prompted_store(selector, draw(PROMPT, 1), 60, expected=PROMPT, decode="grow")
    for more, budget in ((20, 60), (48, 60), (50, 62)):
        store.reserve(more)
        assert store.contents.expected_len == [PROMPT + more] and store.tensors.budget.tolist() == [budget]
        there = store.tensors.positions >= 0
        assert torch.equal(store.tensors.state.number[there], store.tensors.positions[there].long()), "statistics stay"


@pytest.mark.parametrize("reserved", [0, 1, 3])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Layout(4), Layout(4)),
        (Layout(4), Layout(9, (2,))),
        (Layout(4, (3, 2)), Layout(5, (3, 6))),
        (Layout(4, (0, 2)), Layout(4, (1, 2))),
    ],
)
def test_slots_are_carried_over(old: Layout, new: Layout, reserved: int) -> None:
    """Slots of the stages and dictionary slots keep their tokens; the other full-precision slots come out empty."""
    positions = torch.randint(0, 99, (2, 3, old.slots), generator=generator(1)).to(torch.int32)
    state = Worth(positions.float() / 2, positions.long() * 3)
    got, got_state = grown_slots(positions, state, old, new, reserved)
    want = torch.full((2, 3, new.slots), -1, dtype=torch.int32)
    want[..., :reserved] = positions[..., :reserved]
    for stage, size in enumerate(old.coded):
        for slot in range(size):
            want[..., new.starts()[stage] + slot] = positions[..., old.starts()[stage] + slot]
    assert got.dtype == torch.int32 and got.tolist() == want.tolist()
    carried = want >= 0
    assert got_state.worth.tolist() == want.div(2).where(carried, 0.0).tolist()
    assert got_state.number.tolist() == want.long().mul(3).where(carried, 0).tolist()
    assert grown_state(positions * 2, old, new, reserved).tolist() == want.mul(2).where(carried, 0).tolist()
    assert grown_state((), old, new, reserved) == ()


def test_expected_lengths_only_rise_and_idle_rows_keep_theirs() -> None:
    assert merge_expected([3, 9, 4], [5, 2, 8], None) == [5, 9, 8]
    assert merge_expected([3, 9, 4], [5, 2, 8], [False, False, True]) == [5, 9, 4]


HEADS = 2
DIM = 4


def limits_of(codec: Any, rows: int) -> RowLimits:
    limits = alloc_limits(codec, rows, HEADS, DIM, "cpu")
    assert limits is not None
    return limits


def test_a_codec_without_stages_has_none() -> None:
    assert alloc_limits(Plain(), 2, HEADS, DIM, "cpu") is None


@product("pins,query_absmax,key_space", ["none", "first", "massive", "newest"], [False, True], ["rotated", "unrotated"])
def test_what_a_codec_does_not_need_is_empty(pins: Any, query_absmax: bool, key_space: Any) -> None:
    pinned = 0 if pins == "none" else 3
    pin_heads = HEADS if pins == "newest" else 1
    codec = Fake(caps=(4,), pins=pins, pinned=pinned, query_absmax=query_absmax, key_space=key_space)
    limits = limits_of(codec, 2)
    assert limits.flush_threshold.tolist() == [[BEYOND]] * 2, "nothing is demoted before a budget is known"
    assert limits.stage_capacity.tolist() == [[0, 0]] * 2
    assert limits.pins.tolist() == [[[-1] * pinned] * pin_heads] * 2
    assert limits.rope_offset.tolist() == [0] * (2 if key_space == "unrotated" else 0)
    assert [each.shape for each in limits.statistics] == [(2, HEADS, DIM)] * query_absmax
    assert [each.shape for each in limits_of(Fake(query_squares=3), 2).statistics] == [(2, HEADS, DIM)]


def test_rows_with_a_dictionary_have_a_smaller_buffer() -> None:
    codec = Fake(pins="newest", pinned=2)
    limits = limits_of(codec, 3)
    limits.pins[0, 0, 1] = 7
    limits.pins[1, 0, 0] = 0
    exact = codec.layout(50).exact
    assert with_tokens(limits, codec, [50, 50, 50], 2).flush_threshold.tolist() == [[exact - 2], [exact - 2], [exact]]
    assert has_dictionary(limits).flatten().tolist() == [False, True, False], "the first one is there, or none"


@pytest.mark.parametrize("budgets", [[1000, 1000], [8, 300], [300, 8]], ids=str)
def test_limits_are_those_of_the_tokens_that_a_row_may_hold(budgets: list[int]) -> None:
    """A budget beyond the tokens that are announced changes nothing; a block is as large as that of the longest row."""
    codec = TokenWise()
    layer = LayerStore(LayerSpec(0, Ranking(), codec))  # pyright: ignore[reportArgumentType]
    layer.initialize(torch.zeros(2, HEADS, 5, DIM))
    layer.contents.expected_len = [10, 300]
    layer.contents.set_budget(torch.tensor(budgets))
    want = [traits_for(codec, min(pair)) for pair in zip(budgets, layer.contents.expected_len, strict=True)]
    assert layer.tensors.limits is not None
    assert layer.tensors.limits.block.flatten().tolist() == [traits.block for traits in want]
    assert layer.tensors.limits.residual.flatten().tolist() == [traits.residual for traits in want]
    assert layer.contents.largest_block == max(traits.block for traits in want)
    if budgets[0] > 300:
        assert want[0].block < want[1].block


def counted(schedule: RankSchedule) -> bool:
    """Count a step; whether a row may be due."""
    schedule.steps -= 1
    return schedule.steps < 1


def run(every: int, budget: list[int], steps: int, lacks: dict[int, int] | None = None) -> list[list[int]]:
    """The lengths at which each row is ranked after prompts of 10 tokens; row r gets no token in step `lacks[r]`."""
    schedule = RankSchedule(every)
    schedule.start(len(budget))
    length = torch.full((len(budget),), 10)
    most = torch.tensor(budget)
    schedule.note(None, length, most)
    found: list[list[int]] = [[] for _ in budget]
    for step in range(steps):
        length += torch.tensor([step != (lacks or {}).get(row) for row in range(len(budget))])
        if counted(schedule):
            due = schedule.due(length, most)
            schedule.note(due, length, most)
            for row in due.nonzero()[:, 0].tolist():
                found[row].append(int(length[row]))
    return found


def test_every_few_tokens() -> None:
    assert run(4, [20, 20], 13) == [[14, 18, 22]] * 2


def test_never() -> None:
    assert run(0, [20], 50) == [[]]


@pytest.mark.parametrize(("budget", "wait"), [(6, 3), (7, 3), (2, 1), (1, 1), (0, 1), (400, 5)])
def test_half_a_budget_at_most(budget: int, wait: int) -> None:
    assert run(5, [budget], 2 * wait) == [[10 + wait, 10 + 2 * wait]]


def test_a_row_counts_its_own_tokens() -> None:
    assert run(4, [20, 20], 9, lacks={1: 2}) == [[14, 18], [14, 18]]
    assert run(4, [20, 6], 6, lacks={1: 2}) == [[14], [13]]


def test_rows_are_selected_and_repeated() -> None:
    schedule = RankSchedule(4)
    schedule.start(2)
    schedule.note(torch.tensor([False, True]), torch.tensor([3, 7]), torch.tensor([20, 20]))
    schedule.map_rows(lambda t: t[[1, 0, 1]])
    assert schedule.ranked_len == [7, 0, 7]


def tokens_from(first: int) -> SlotData:
    """Five tokens of each head, whose parts all say which position they have."""
    positions = torch.arange(first, first + 5, dtype=torch.int32).expand(2, 3, -1)
    keys = positions[..., None].expand(-1, -1, -1, 4).float()
    return SlotData(keys, -keys, positions, Worth(positions / 2, positions.long()), positions.float().log())


def test_a_dictionary_keeps_what_it_holds() -> None:
    open_slots = torch.tensor([[False, False, True, True, True], [True] * 5])[:, None]
    data = with_dictionary(tokens_from(1), tokens_from(11), 2, open_slots)
    want = torch.tensor([[11, 12, 3, 4, 5], [1, 2, 3, 4, 5]])[:, None].expand(-1, 3, -1)
    assert torch.equal(data.positions, want) and torch.equal(data.state.number, want)
    assert torch.equal(data.state.worth, want / 2) and isinstance(data.counts, torch.Tensor)
    assert torch.equal(data.counts, want.float().log())
    assert torch.equal(data.keys, want[..., None].expand(-1, -1, -1, 4)) and torch.equal(data.values, -data.keys)


LAYOUTS = [Layout(0), Layout(1), Layout(5), Layout(3, (4,)), Layout(6, (2,)), Layout(2, (0, 7)), Layout(2, (3, 1))]


def test_a_layout_is_the_larger_one_stage_by_stage() -> None:
    for old, wanted in itertools.product(LAYOUTS, LAYOUTS):
        grown = grown_layout(old, wanted)
        assert grown.exact == max(old.exact, wanted.exact)
        for stage in range(3):
            sizes = [layout.coded[stage] if stage < len(layout.coded) else 0 for layout in (old, wanted, grown)]
            assert sizes[2] == max(sizes[:2])
        assert grown_layout(grown, old) == grown_layout(grown, wanted) == grown


def test_addresses_are_fixed_without_a_guard() -> None:
    """A guard would compile the step again for every cache."""
    parts = [torch.zeros(2), Worth(torch.zeros(1), torch.zeros(1)), ()]
    fix_addresses(parts)
    marks = [getattr(t, "_dynamo_static_input_type", None) for part in parts for t in tensors(part)]
    assert marks == ["unguarded"] * 3


ROWS = 2
WIDTH = 3


def with_threshold(codec: Fake, threshold: list[int]) -> RowLimits:
    limits = alloc_limits(codec, len(threshold), HEADS, WIDTH, "cpu")
    assert limits is not None
    return limits._replace(flush_threshold=torch.tensor(threshold)[:, None])


@pytest.mark.parametrize("group_size", [1, 4])
def test_a_prompt_leaves_less_than_a_block_below_the_threshold(group_size: int) -> None:
    """Whole groups leave, oldest first, until fewer than a group more could."""
    codec = Fake(block=4, group_size=group_size, residual=2)
    counts = torch.tensor([[0, 5], [6, 7], [13, 40], [40, 40]])
    threshold = [6, 6, 9, BEYOND]
    moved = demoted_counts(counts, with_threshold(codec, threshold), codec.traits, None)
    for b in range(len(counts)):
        for h in range(HEADS):
            left = int(counts[b, h])
            want = 0
            while left - group_size >= threshold[b] - codec.block:
                left -= group_size
                want += group_size
            assert int(moved[b, h]) == want, (b, h)
    idle = torch.tensor([False, True, True, False])
    assert demoted_counts(counts, with_threshold(codec, threshold), codec.traits, idle).tolist() == [
        [0, 0] if skip else row for skip, row in zip(idle.tolist(), moved.tolist(), strict=True)
    ]


def order_of(codec: Fake, selector: Ranking, length: Tensor, budget: Tensor) -> DemotionOrder:
    limits = alloc_limits(codec, ROWS, HEADS, WIDTH, "cpu")
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
