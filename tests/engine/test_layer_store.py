"""A layer's verbs, against a list of tokens for each head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import H2O, StreamingLLM
from kvpolicy.codecs.plain import Plain
from kvpolicy.engine.invariants import check_invariants
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.engine.state import tensors
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy.text.errors import KVPolicyStateError
from tests.conformance.fakes import Fake
from tests.engine.parts import Ranking, Uncoded, generator, slots_of
from tests.sampling import each_once, product

ROWS = 2
HEADS = 2
GROUP = 2
DIM = 4
SINKS = 2
SCALE = ScoreTransform(0.5)


class List:
    """One row of a layer that keeps the first two tokens and the newest ones, as Python lists."""

    def __init__(self, budget: int, grows: bool) -> None:
        self.budget = budget
        self.grows = grows
        self.tokens: list[tuple[int, Tensor, Tensor]] = []
        self.seen = 0

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Take in tokens, keys and values [H, n, D]."""
        for j in range(keys.shape[1]):
            self.tokens.append((self.seen, keys[:, j], values[:, j]))
            self.seen += 1

    def evict(self, count: int) -> None:
        """Drop tokens until there are `count`: the oldest after the sinks."""
        while len(self.tokens) > count:
            del self.tokens[SINKS]

    def attend(self, queries: Tensor, new: int) -> Tensor:
        """Outputs of queries [Hq, n, D], the last n tokens' own, [Hq, n, D]."""
        out = torch.zeros_like(queries)
        for hq in range(HEADS * GROUP):
            for i in range(new):
                seen = self.tokens[: len(self.tokens) - new + i + 1]
                keys = torch.stack([key[hq // GROUP] for _, key, _ in seen])
                values = torch.stack([value[hq // GROUP] for _, _, value in seen])
                out[hq, i] = (keys @ queries[hq, i] * 0.5).softmax(0) @ values
        return out

    @property
    def positions(self) -> list[int]:
        return [position for position, _, _ in self.tokens]


def draw(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of so many tokens in each row."""
    dice = generator(seed)
    shape = [(ROWS, heads, count, DIM) for heads in (HEADS * GROUP, HEADS, HEADS)]
    q, k, v = (torch.randn(*size, generator=dice) for size in shape)
    return q, k, v


class Pair:
    """A store and the lists of its rows."""

    def __init__(self, codec: Any, budgets: list[int], *, grows: bool = False, planned: int = 0) -> None:
        self.store = LayerStore(LayerSpec(0, StreamingLLM(sinks=SINKS), codec, "grow" if grows else "evict"))
        self.rows = [List(budget, grows) for budget in budgets]
        self.grows = grows
        self.columns = 0
        self.planned = planned
        """Tokens that a growing layer is told of, or that one which evicts is told too few of."""

    def prompt(self, count: int, seed: int, valid: list[list[bool]] | None = None) -> None:
        q, k, v = draw(count, seed)
        mask = None if valid is None else torch.tensor(valid)
        if not self.store.is_initialized:
            self.store.initialize(k, group=q.shape[1] // k.shape[1])
        self.columns += count
        out, pending = self.store.attend_prompt(q, k, v, mask, SCALE)
        keep = torch.tensor([row.budget for row in self.rows])
        extra = torch.full_like(keep, self.planned if self.grows else 0)
        held = torch.tensor([min(row.budget, row.seen + count) for row in self.rows])
        expected = keep + extra if self.grows or not self.planned else torch.minimum(keep, held)
        self.store.compress(pending, RowBudget(keep, extra, expected, expected))
        self.store.ensure_capacity()
        for b, row in enumerate(self.rows):
            own = slice(None) if mask is None else mask[b]
            row.add(k[b][:, own], v[b][:, own])
            new = count if mask is None else int(mask[b].sum())
            torch.testing.assert_close(out[b][:, own], row.attend(q[b][:, own], new), atol=1e-5, rtol=1e-4)
            if new:  # a row of nothing but padding is not called
                row.evict(row.budget)
        self.check()

    def step(self, seed: int, valid: list[bool] | None = None) -> None:
        q, k, v = draw(1, seed)
        mask = None if valid is None else torch.tensor(valid)[:, None]
        self.columns += 1
        places = [self.store.tensors.keys.data_ptr(), self.store.tensors.positions.data_ptr()]
        out = self.store.append(q, k, v, mask, SCALE)
        assert places == [self.store.tensors.keys.data_ptr(), self.store.tensors.positions.data_ptr()], (
            "a step works in place"
        )
        self.store.count_step()
        self.store.ensure_capacity()
        for b, row in enumerate(self.rows):
            if valid is not None and not valid[b]:
                continue
            if not row.grows:
                row.evict(row.budget - 1)
            row.add(k[b], v[b])
            torch.testing.assert_close(out[b], row.attend(q[b], 1), atol=1e-5, rtol=1e-4)
        self.check()

    def check(self) -> None:
        check_invariants(self.store)
        past = self.store.past()
        assert past is not None
        assert int(self.store.tensors.columns) == self.columns, "padding counts"
        for b, row in enumerate(self.rows):
            assert int(self.store.tensors.length[b]) == row.seen
            for h in range(HEADS):
                held = {int(p): slot for slot, p in enumerate(self.store.tensors.positions[b, h].tolist()) if p >= 0}
                assert sorted(held) == row.positions
                for position, key, value in row.tokens:
                    assert torch.equal(past.keys[b, h, held[position]], key[h])
                    assert torch.equal(past.values[b, h, held[position]], value[h])


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
VALID = [[True] * 9, [False] * 4 + [True] * 5]


@product("name,budgets,valid", [*CODECS], [[3, 3], [6, 9], [99, 4]], [None, VALID], ids=str)
def test_a_conversation_is_that_of_a_list(name: str, budgets: list[int], valid: list[list[bool]] | None) -> None:
    pair = Pair(CODECS[name], budgets)
    pair.prompt(9, 0, valid)
    for seed in range(1, 12):
        pair.step(seed)
    pair.prompt(5, 50, [[True] * 5, [False, True, False, True, True]])
    for seed in range(60, 66):
        pair.step(seed, [True, seed % 2 == 0])
    pair.prompt(3, 70, [[True] * 3, [False] * 3])
    pair.step(80)


@product("name,planned", [*CODECS], [0, 3, 40], sample=each_once([*CODECS], [0, 3, 40]))
def test_a_growing_layer_keeps_every_generated_token(name: str, planned: int) -> None:
    """Told of the tokens to come or not; what it was not told of is added in time."""
    pair = Pair(CODECS[name], [4, 6], grows=True, planned=planned)
    pair.prompt(9, 0)
    for seed in range(1, 25):
        pair.step(seed)
    assert [len(row.tokens) for row in pair.rows] == [4 + 24, 6 + 24]


@pytest.mark.parametrize("name", ["plain", "two stages"])
def test_a_layer_that_was_told_too_little_gets_more_slots(name: str) -> None:
    pair = Pair(CODECS[name], [40, 12], planned=1)
    pair.prompt(5, 0)
    assert pair.store.contents.can_run_out
    for seed in range(1, 50):
        pair.step(seed)
    assert [len(row.tokens) for row in pair.rows] == [40, 12]


def test_room_is_reserved_at_once() -> None:
    pair = Pair(Plain(), [4, 6], grows=True)
    pair.prompt(9, 0)
    assert pair.store.contents.expected_len == [4 + 16, 6 + 16], (
        "what a layer gets that knows nothing of the tokens to come"
    )
    assert pair.store.reserve(40) == 40 - 16
    assert pair.store.contents.expected_len == [44, 46] and pair.store.tensors.budget.tolist() == [44, 46]
    place = pair.store.tensors.keys.data_ptr()
    assert pair.store.reserve(5) == 0, "there is room already"
    for seed in range(1, 39):
        pair.step(seed)
    assert pair.store.tensors.keys.data_ptr() == place


def test_without_room_a_step_is_refused() -> None:
    pair = Pair(Plain(), [4, 6], grows=True)
    pair.prompt(9, 0)
    pair.store.contents.set_budget(torch.tensor([4, 6]))
    pair.store.recount()
    q, k, v = draw(1, 1)
    with pytest.raises(KVPolicyStateError, match=r"no room left: call cache\.tick"):
        pair.store.append(q, k, v, None, SCALE)


def test_a_compiled_step_without_room_fails() -> None:
    """It does not read the count of the host."""
    torch.compiler.reset()
    pair = Pair(Plain(), [4, 6], grows=True)
    pair.prompt(9, 0)
    pair.store.contents.set_budget(torch.tensor([4, 6]))
    step = torch.compile(pair.store.append, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"no room left: call cache\.tick"):
        step(*draw(1, 1), None, SCALE)


@pytest.mark.parametrize("name", CODECS)
def test_the_state_of_a_token_goes_where_the_token_goes(name: str) -> None:
    """A prompt observes every token, coded ones too, and a step writes a state of zeros for the new one."""
    selector = Ranking(score=lambda state, seen, view: -1.0 - view.positions * 5 % 7)  # new tokens outlive others
    store = LayerStore(LayerSpec(0, selector, CODECS[name], "evict"))  # pyright: ignore[reportArgumentType]
    observed = 0
    for seed, count in enumerate([9, 1, 1, 1, 4, 1, 1, 1, 1, 5]):
        q, k, v = draw(count, seed)
        if count > 1:
            prompted(store, q, k, v, keep=8)
            observed = int(store.tensors.length[0])
        else:
            store.append(q, k, v, None, SCALE)
            store.count_step()
        there = store.tensors.positions >= 0
        assert there.sum(-1).eq(8).all()
        worth, number = (part.where(there, 0) for part in store.tensors.state)
        old = there & (store.tensors.positions < observed)
        assert torch.equal(number, store.tensors.positions.long().where(old, 0))
        assert torch.equal(worth, (-1.0 - store.tensors.positions * 5 % 7).where(old, 0.0))


def test_the_largest_queries_are_those_of_all_prompts() -> None:
    store = LayerStore(LayerSpec(0, StreamingLLM(sinks=SINKS), Fake(query_absmax=True), "evict"))
    largest = torch.zeros(ROWS, HEADS, DIM)
    for seed, sharp in enumerate([1.0, 5.0, 0.5]):
        q, k, v = draw(6, seed)
        prompted(store, q * sharp, k, v)
        largest = torch.maximum(largest, (q * sharp).abs().amax(2).unflatten(1, (HEADS, GROUP)).amax(2))
        assert store.tensors.limits is not None and torch.equal(store.tensors.limits.statistics[0], largest)


def test_the_squares_of_queries_are_those_of_the_last_prompt_of_a_row() -> None:
    store = LayerStore(LayerSpec(0, StreamingLLM(sinks=SINKS), Fake(query_squares=3), "evict"))
    want = torch.zeros(ROWS, HEADS, DIM)
    for seed, rows in enumerate([[True, True], [True, False], [False, True]]):
        q, k, v = draw(6, seed)
        valid = torch.tensor(rows)[:, None].expand(ROWS, 6)
        prompted(store, q, k, v, valid)
        own = q[:, :, -3:].square().mean(2).unflatten(1, (HEADS, GROUP)).mean(2)
        want = torch.where(valid[:, :1, None], own, want)
        assert store.tensors.limits is not None
        torch.testing.assert_close(store.tensors.limits.statistics[0], want)


def test_recoding_leaves_heads_that_are_not_due_as_they_are() -> None:
    codec = Exact(block=3, residual=0, demote_by="priority", recode_all=True)
    store = prompted(LayerStore(LayerSpec(0, H2O(), codec, "evict")), *draw(12, 0), keep=9)
    held = store.tensors
    assert held.limits is not None
    for seed in range(1, 4):
        store.append(*draw(1, seed), None, SCALE)
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
