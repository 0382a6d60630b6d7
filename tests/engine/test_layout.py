"""What a layer counts on the host, and what moves when its slots grow: steps, limits, rankings and demoted tokens.

What is kept and what comes out is tested in `tests/conformance`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import H2O, StreamingLLM
from kvpolicy.codecs.plain import Plain
from kvpolicy.codecs.tokenwise import TokenWise
from kvpolicy.engine.demotion import DemotionOrder
from kvpolicy.engine.editing import note_move
from kvpolicy.engine.invariants import check_invariants
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.layout import (
    free_steps,
    grown_slots,
    grown_state,
    merge_expected,
    slots_needed,
)
from kvpolicy.engine.rank_schedule import RankSchedule
from kvpolicy.engine.row_limits import RowBudget, alloc_limits
from kvpolicy.engine.state import tensors
from kvpolicy.engine.token_batch import SlotData, with_dictionary
from kvpolicy.protocols import SINGLE_RANK, Layout, View, traits_for
from kvpolicy.statistics import Results
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy.text.errors import KVPolicyStateError
from tests.conformance.fakes import Fake
from tests.engine.parts import Ranking, Uncoded, Worth, generator, prompted_store, slots_of
from tests.readers.bench import draw

ROWS = 2
HEADS = 2
GROUP = 2
DIM = 8
SCALE = ScoreTransform(0.5)
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


@pytest.mark.parametrize("grows", [False, True])
def test_a_row_without_a_free_slot_is_given_some(grows: bool) -> None:
    """A growing one gets those of the next steps, whether its budget or its slots end first; others to the budget."""
    dice = Random(0)
    for _ in range(100):
        slots = dice.randint(1, 400)
        budget = dice.randint(1, 400)
        held = dice.choice([min(slots, budget), dice.randint(0, min(slots, budget))])
        (added,) = slots_needed([slots], [budget], [held], grows=grows)
        step = min(max(held // 8, 16), 256)
        if held < min(slots, budget):
            assert added == 0
        elif grows:
            assert added == max(held + step - slots, 0)
        else:
            assert added == min(step, max(budget - slots, 0))


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


class Exact(Fake):
    """A codec whose stages give back what they are given."""

    @property
    def stages(self) -> tuple[Any, ...]:
        return tuple(Uncoded() for _ in range(len(self.caps) + 1))


CODECS = {
    "plain": Plain(),
    "one stage": Exact(block=2, residual=1),
    "two stages": Exact(caps=(3,), block=2, residual=1),
    "a stage smaller than a block": Exact(caps=(1,), block=3, residual=0),
}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(
    ("decode", "budget", "expected", "kept"),
    [("grow", 4, 4, [0, 1, *range(7, 58)]), ("evict", 40, 9, [0, 1, *range(20, 58)])],
)
def test_slots_are_added_for_tokens_that_nobody_announced(
    name: str, decode: Any, budget: int, expected: int, kept: list[int]
) -> None:
    """What a growing layer was not told of is added in time, and so is what a layer lacks of its budget."""
    drawn = [draw(9, 0), *(draw(1, seed) for seed in range(1, 50))]
    store = prompted_store(StreamingLLM(sinks=2), drawn[0], budget, expected, decode, CODECS[name])
    store.ensure_capacity()
    for q, k, v in drawn[1:]:
        store.append(q, k, v, None, SCALE)
        store.count_step()
        store.ensure_capacity()
        check_invariants(store)
    past = store.past()
    assert past is not None
    keys, values = (torch.cat(given, 2)[0] for given in [*zip(*drawn, strict=True)][1:])
    for head, positions in enumerate(store.tensors.positions[0]):
        slots = positions.argsort()[-len(kept) :]
        assert positions[slots].tolist() == kept and positions.max() == 57 and (positions >= 0).sum() == len(kept)
        assert torch.equal(past.keys[0, head, slots], keys[head, kept])
        assert torch.equal(past.values[0, head, slots], values[head, kept])


def growing_store() -> LayerStore:
    """A layer that holds four tokens, and has room for 16 more: it knows nothing of the tokens to come."""
    store = prompted_store(StreamingLLM(sinks=2), draw(9, 0), 4, decode="grow")
    store.ensure_capacity()
    return store


def test_room_is_reserved_at_once() -> None:
    store = growing_store()
    assert store.contents.expected_len == [4 + 16]
    assert store.reserve(40) == 40 - 16
    assert store.contents.expected_len == [44] and store.tensors.budget.tolist() == [44]
    place = store.tensors.keys.data_ptr()
    assert store.reserve(5) == 0, "there is room already"
    for seed in range(1, 39):
        store.append(*draw(1, seed), None, SCALE)
        store.count_step()
        store.ensure_capacity()
    assert store.tensors.keys.data_ptr() == place


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_step_without_room_fails(is_compiled: bool) -> None:
    """A compiled one does not read the count of the host."""
    store = growing_store()
    store.contents.set_budget(torch.tensor([4]))
    step: Any = store.append
    if is_compiled:
        torch.compiler.reset()
        step = torch.compile(step, backend="eager", fullgraph=True)
    else:
        store.recount()
    with pytest.raises(RuntimeError if is_compiled else KVPolicyStateError, match=r"no room left: call cache\.tick"):
        step(*draw(1, 1), None, SCALE)


def prompted(
    store: LayerStore, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None, keep: int = 12
) -> LayerStore:
    """A layer that takes in a prompt and keeps so many tokens of each row."""
    if not store.is_initialized:
        store.initialize(k, group=q.shape[1] // k.shape[1])
    _, pending = store.attend_prompt(q, k, v, valid, SCALE)
    tokens = torch.full((ROWS,), keep)
    store.compress(pending, RowBudget(tokens, torch.zeros_like(tokens), tokens, tokens))
    return store


def test_the_largest_queries_are_those_of_all_prompts() -> None:
    store = LayerStore(LayerSpec(0, StreamingLLM(sinks=2), Fake(query_absmax=True), "evict"))
    largest = torch.zeros(ROWS, HEADS, DIM)
    for seed, sharp in enumerate([1.0, 5.0, 0.5]):
        q, k, v = draw(6, seed, batch=ROWS)
        prompted(store, q * sharp, k, v)
        largest = torch.maximum(largest, (q * sharp).abs().amax(2).unflatten(1, (HEADS, GROUP)).amax(2))
        assert store.tensors.limits is not None and torch.equal(store.tensors.limits.statistics[0], largest)


def test_the_squares_of_queries_are_those_of_the_last_prompt_of_a_row() -> None:
    store = LayerStore(LayerSpec(0, StreamingLLM(sinks=2), Fake(query_squares=3), "evict"))
    want = torch.zeros(ROWS, HEADS, DIM)
    for seed, rows in enumerate([[True, True], [True, False], [False, True]]):
        q, k, v = draw(6, seed, batch=ROWS)
        valid = torch.tensor(rows)[:, None].expand(ROWS, 6)
        prompted(store, q, k, v, valid)
        own = q[:, :, -3:].square().mean(2).unflatten(1, (HEADS, GROUP)).mean(2)
        want = torch.where(valid[:, :1, None], own, want)
        assert store.tensors.limits is not None
        torch.testing.assert_close(store.tensors.limits.statistics[0], want)


def test_recoding_leaves_heads_that_are_not_due_as_they_are() -> None:
    codec = Exact(block=3, residual=0, demote_by="priority", recode_all=True)
    store = prompted(LayerStore(LayerSpec(0, H2O(), codec, "evict")), *draw(12, 0, batch=ROWS), keep=9)
    held = store.tensors
    assert held.limits is not None
    for seed in range(1, 4):
        store.append(*draw(1, seed, batch=ROWS), None, SCALE)
        if bool((slots_of(store).codes.buffered() >= held.limits.flush_threshold).all()):
            break
        store.count_step()
    # One head has a token less, as where tokens were merged.
    held.positions[:, 0, held.positions[0, 0].argmax()] = -1
    due = slots_of(store).codes.buffered() >= held.limits.flush_threshold
    assert due.tolist() == [[False, True]] * ROWS
    parts = (held.positions, held.state, held.counts)
    before = [t.clone() for t in tensors(parts)]
    store.count_step()
    parts = (held.positions, held.state, held.counts)
    for old, new in zip(before, tensors(parts), strict=True):
        assert torch.equal(old[:, 0], new[:, 0])
    assert not torch.equal(before[0][:, 1], held.positions[:, 1])
