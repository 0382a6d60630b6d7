"""Which entries are read: their slots, their ranking, and what a prompt says about channels."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import KIVI, DoubleSparsity, ExactTopK, Plain, Quest, ReadAll, TokenWise
from kvpolicy.engine.reading import (
    Choice,
    ReadShape,
    by_entry,
    channel_salience,
    choose,
    entries_of,
    entry_slots,
    follow,
    largest_counts,
    need_of,
    read_shape,
    row_entries,
)
from kvpolicy.engine.reading_in_order import choose_in_order, held_by, slots_of
from kvpolicy.kernels import largest as module
from kvpolicy.protocols import SINGLE_RANK, Layout, StepMemo
from kvpolicy.statistics.channel_sums import absolute_sums
from kvpolicy_eval.bench.models import llama, tokens
from tests.engine.parts import generator
from tests.sampling import product


def by_score(score: Tensor, ranks: Any = SINGLE_RANK) -> Any:
    """How much entries are needed by their scores."""
    return partial(need_of, score, ranks=ranks)


ONE = ReadShape(3, 2, ((0, 8),))
TWO = ReadShape(3, 2, ((5, 7), (12, 4)))


def test_entries_end_where_their_part_ends() -> None:
    slots, inside = entry_slots(TWO, torch.arange(TWO.entries)[None, None])
    found = [page[own].tolist() for page, own in zip(slots[0, 0], inside[0, 0], strict=True)]
    assert found == [[5, 6, 7], [8, 9, 10], [11], [12, 13, 14], [15]]
    assert int(slots.max()) == 15
    assert entries_of(TWO, 0, torch.tensor([0, 3, 6])).tolist() == [0, 1, 2]
    assert entries_of(TWO, 1, torch.tensor([0, 3])).tolist() == [3, 4]
    held = by_entry(TWO, torch.arange(16, dtype=torch.int32)[None, None])[0, 0]
    assert held.tolist() == [[5, 6, 7], [8, 9, 10], [11, -1, -1], [12, 13, 14], [15, -1, -1]]


@pytest.mark.parametrize(
    ("reader", "codec", "layout", "want"),
    [
        (Quest(read=8, dense=0), Plain(), Layout(30), ReadShape(4, 2, ((0, 30),))),
        (Quest(read=8, dense=1), Plain(), Layout(30), None),
        (Quest(read=29, dense=0), Plain(), Layout(30), None),
        (Quest(read=8, dense=0), Plain(), Layout(5000), ReadShape(16, 1, ((0, 5000),))),
        (Quest(read=8, page=5, dense=0), KIVI(group_size=4), Layout(6, (12,)), ReadShape(8, 2, ((6, 12),))),
        (Quest(read=8, page=5, dense=0), KIVI(group_size=4), Layout(6, (24,)), ReadShape(8, 2, ((6, 24),))),
        (ExactTopK(read=0.25), TokenWise(), Layout(6, (8, 0, 12)), ReadShape(1, 5, ((6, 8), (14, 12)))),
        (DoubleSparsity(read=3, dense=0), Plain(), Layout(3), None),
        (ReadAll(), Plain(), Layout(30), None),
        (ExactTopK(), Plain(), Layout(0), None),
    ],
)
def test_what_is_read_follows_from_the_layout(reader: object, codec: object, layout: Layout, want: object) -> None:
    found = read_shape(reader, codec, layout, 0)  # pyright: ignore[reportArgumentType]
    if want is not None and isinstance(want, ReadShape) and want.chosen >= want.entries:
        want = None
    assert found == want


def test_a_short_row_reads_what_it_would_alone() -> None:
    reader = ExactTopK(read=0.25)
    shape = read_shape(reader, Plain(), Layout(40), 0)
    assert shape is not None and shape.chosen == 10
    assert row_entries(reader, Plain(), shape, [40, 12, 0]) == [10, 3, 1]
    pages = Quest(read=0.25, page=4, dense=0)
    shape = read_shape(pages, Plain(), Layout(40), 0)
    assert shape is not None and shape.chosen == 3
    # Tokens that are read, in whole pages.
    assert row_entries(pages, Plain(), shape, [40, 32, 20, 12]) == [3, 2, 2, 1]
    # All entries that hold what it would read alone in pages of 4 slots: 20 slots are five of these, and two of 16.
    assert row_entries(Quest(read=20), Plain(), ReadShape(16, 2, ((0, 5008),)), [5000, 100]) == [2, 2]


def test_the_first_token_may_be_in_the_buffer() -> None:
    """It is read there, so that the first of the coded tokens is read only if it is needed."""
    positions = torch.tensor([[[0, 9, -1, 3, 4, 5, 6]]], dtype=torch.int32)
    shape = ReadShape(1, 2, ((3, 4),))
    score = torch.tensor([[[[-9.0, 0, 2, 1]]]])
    for held, want in ((positions, [5, 6]), (positions.masked_fill(positions == 0, -1), [3, 5])):
        found = choose(shape, torch.tensor([2]), by_score(score), held, torch.tensor([10]), 1)
        assert sorted(held[0, 0][found.slots[0, 0][found.chosen[0, 0]]].tolist()) == want


def test_the_query_head_that_needs_an_entry_most_decides() -> None:
    score = torch.tensor([[[[0.0, 1.0, 50.0], [5.0, 0.0, 0.0]]]])
    need = need_of(score, torch.tensor([[[False, False, True]]]), SINGLE_RANK)[0, 0]
    want = [math.log(math.exp(5) / (math.exp(5) + 1)), math.log(math.e / (1 + math.e))]
    assert need[:2].tolist() == pytest.approx(want, abs=1e-6)


def salience(q: Tensor, k: Tensor, valid: Tensor | None) -> Tensor:
    count = torch.full((len(q),), q.shape[2]) if valid is None else valid.sum(-1)
    return channel_salience(absolute_sums(q, k, valid), count, SINGLE_RANK)


def test_salience_is_a_mean_over_all_pairs_and_ignores_padding() -> None:
    q = torch.randn(2, 4, 5, 3, generator=generator(1))
    k = torch.randn(2, 2, 5, 3, generator=generator(2))
    valid = torch.tensor([[True] * 5, [False, False, True, True, True]])
    found = salience(q, k.masked_fill(~valid[:, None, :, None], torch.nan), valid)
    for row, start in ((0, 0), (1, 2)):
        for head in range(2):
            pairs = q[row, 2 * head : 2 * head + 2, start:, None] * k[row, None, head, None, start:]
            assert torch.allclose(found[row, head], pairs.abs().mean((0, 1, 2)), atol=1e-6)
    alone = salience(q[1:, :, 2:], k[1:, :, 2:], None)
    assert torch.equal(found[1:], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_salience_of_thousands_of_tokens_is_not_rounded(dtype: torch.dtype) -> None:
    q, k = (torch.ones(1, heads, 3001, 2, dtype=dtype) for heads in (2, 1))
    valid = torch.arange(3001)[None] > 0
    for given in (None, valid):
        assert salience(q, k, given).flatten().tolist() == pytest.approx([1.0, 1.0], abs=1e-6)


def test_the_count_of_an_empty_slot_does_not_matter() -> None:
    positions = torch.arange(16, dtype=torch.int32).masked_fill(torch.arange(16) % 3 == 0, -1)[None, None]
    counts = torch.arange(16.0)[None, None]
    assert largest_counts(TWO, counts, positions).tolist() == [[[7, 10, 11, 14, 0]]]


def beside(need: Tensor) -> Tensor:
    """What two ranks need, of which the other one needs the last entry most."""
    other = torch.full_like(need, -9.0)
    other[..., -1] = -0.01
    return torch.maximum(need, other)


def test_query_heads_of_other_ranks_decide_too() -> None:
    positions = torch.arange(8, dtype=torch.int32)[None, None]
    score = torch.tensor([[[[0.0, 5, 0, 0, 0, 0, 0, 0]]]])
    newest = torch.tensor([9])  # its position 8 is in none of the slots
    for ranks, read in ((SINGLE_RANK, [0, 1]), (SimpleNamespace(largest=beside), [0, 7])):
        needs = by_score(score, ranks)
        found = choose(ReadShape(1, 2, ((0, 8),)), torch.tensor([2]), needs, positions, newest, 0)
        assert sorted(found.slots[0, 0].tolist()) == read


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_layer_that_follows_reads_the_newest_token_besides_what_was_chosen(limit: int) -> None:
    """Even if the layer that chooses does not show it; and of the chosen tokens, those that it holds."""
    positions = torch.tensor([[[6, 2, -1, 9, 4, 0]]], dtype=torch.int32)
    choice = Choice(torch.tensor([[[4, 7, -1, 2]]], dtype=torch.int32), torch.zeros(1, 1, 4, dtype=torch.int32))
    found = follow(ReadShape(1, 3, ((0, 6),), 1), torch.tensor([limit]), choice, positions, torch.tensor([10]), False)
    assert positions[0, 0][found.slots[0, 0][found.chosen[0, 0]]].tolist() == [9, 4, 2][:limit]


SLOTS = 22
LENGTHS = torch.tensor([SLOTS, 21, 9, 1, 0])
"""Of rows: full ones, one with free slots, one with a token, and one without."""
SHAPES = [ReadShape(page, chosen, ((0, SLOTS),)) for page, chosen in ((1, 5), (2, 3), (4, 3), (4, 5), (11, 1))]


def positions(heads: int) -> torch.Tensor:
    slot = torch.arange(SLOTS)
    return torch.where(slot < LENGTHS[:, None, None], slot, -1).int().expand(-1, heads, -1)


@product("shape,kind,recent,sinks", SHAPES, ["random", "equal", "broken"], [0, 1, 6], [0, 3])
def test_the_same_is_chosen(shape: ReadShape, kind: str, recent: int, sinks: int) -> None:
    score = torch.randn(len(LENGTHS), 2, 3, shape.entries, generator=generator(shape.chosen))
    if kind == "equal":
        score.zero_()
    elif kind == "broken":
        score[:, :, :, ::2] = torch.tensor([torch.nan, torch.inf, -torch.inf])[:, None]
    needs = by_score(score)
    limit = torch.full((len(LENGTHS),), shape.chosen)
    for in_slots_order in (False, True):
        want = choose(shape, limit, needs, positions(2), LENGTHS, recent, in_slots_order, sinks=sinks)
        memo = StepMemo({})
        got = choose_in_order(shape, needs, LENGTHS, recent, memo, in_slots_order, sinks=sinks)
        assert got.none_empty
        hold = want.chosen & (positions(2).gather(-1, want.slots) >= 0)
        assert torch.equal(got.chosen.sum(-1), hold.sum(-1))
        for row in range(len(LENGTHS)):
            for head in range(2):
                assert torch.equal(got.slots[row, head][got.chosen[row, head]], want.slots[row, head][hold[row, head]])
        assert bool((got.slots < SLOTS).all())
        assert got.entries is not None and got.read is not None and want.read is not None
        assert torch.equal(got.read.sum(-1), want.read.sum(-1))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_slots_of_entries_are_the_same(shape: ReadShape) -> None:
    entries = torch.arange(shape.entries).expand(len(LENGTHS), 2, -1)
    slots, inside = entry_slots(shape, entries)
    assert torch.equal(slots_of(shape, entries), slots.flatten(2))
    held = inside & (by_entry(shape, positions(2)) >= 0)
    assert torch.equal(held_by(shape, entries, LENGTHS), held)
    some = slice(1, 3)  # as many rows as heads, so that a number of rows could be taken for one of heads
    blocks = entries[some, :, :, None]
    assert torch.equal(slots_of(shape, blocks), slots[some].flatten(2))
    assert torch.equal(held_by(shape, blocks, LENGTHS[some]), held[some, :, :, None])


@pytest.mark.parametrize(
    "text",
    [
        *("full+quest:read=8:dense=0", "full+quest:read=12:page=5:dense=1", "full+centroids:read=8:page=2"),
        *("full+retrieval:read=8:dense=0", "full+sparq:read=8:dense=0", "full+shadowkv:read=16"),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_layers_of_a_step_read_what_each_reads_alone(text: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is shared, slots are chosen by their positions."""
    model = llama(2, 64, heads=4)
    ids = tokens(40).expand(2, -1)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :9] = 0
    answers: list[torch.Tensor] = []
    for shares in (True, False):
        if not shares:
            monkeypatch.setattr("kvpolicy.hf.cache_forward.SharedStep", lambda memo: None)
        with kvpolicy.attach(model, text), torch.no_grad():
            cache = kvpolicy.PolicyCache(model, new=12)
            model(ids[:, :28], attention_mask=mask[:, :28], cache=cache)
            for column in range(28, 40):
                out = model(ids[:, column, None], attention_mask=mask[:, : column + 1], cache=cache)
                answers.append(out if isinstance(out, torch.Tensor) else out.logits)
    assert len(answers) == 24
    for shared, alone in zip(answers[:12], answers[12:], strict=True):
        assert torch.equal(shared, alone)


LENGTH = 500
KINDS = ["random", "ties", "equal", "broken"]
READ_SHAPES = [
    ReadShape(1, 1, ((0, 300),)),
    ReadShape(1, 15, ((0, 300),)),
    ReadShape(1, 299, ((0, 300),)),
    ReadShape(4, 6, ((0, 299),)),
    ReadShape(3, 5, ((5, 100), (105, 195))),
]


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are ranked in blocks, few as they are."""
    monkeypatch.setattr(module, "_FEWEST", 1)


def draw(shape: ReadShape, kind: str, heads: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, positions, and lengths of three rows: a full one, one with empty slots, and one without a token."""
    dice = generator(shape.entries + shape.chosen)
    slots = shape.parts[-1][0] + shape.parts[-1][1]
    score = torch.randn(3, heads, 2, shape.entries, generator=dice)
    if kind == "ties":
        score = score.round()
    elif kind == "equal":
        score = torch.zeros_like(score)
    elif kind == "broken":
        some = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e38])
        score = some[torch.randint(0, 4, score.shape, generator=dice)]
    order = [torch.randperm(LENGTH, generator=dice)[:slots] for _ in range(3 * heads)]
    positions = torch.stack(order).view(3, heads, slots).int()
    positions[:, :, 7] = torch.where((positions == LENGTH - 1).any(-1), positions[:, :, 7], LENGTH - 1)
    empty = torch.rand(3, heads, slots, generator=dice) < torch.tensor([0.0, 0.9, 1.0])[:, None, None]
    return score, positions.masked_fill(empty, -1), torch.tensor([LENGTH, LENGTH, 0])


def slow(
    shape: ReadShape, limit: int, need: list[float], held: list[list[int]], first: int, length: int, recent: int
) -> list[int]:
    """The entries that one head reads, the most needed first."""

    def place(entry: int) -> tuple[int, float, int]:
        positions = [position for position in held[entry] if position >= 0]
        always = 1 if max(positions) >= length - recent else 0
        always = 2 if min(positions) == first else always
        always = 3 if max(positions) == length - 1 else always
        return -always, -need[entry] if not always else 0.0, min(positions)

    live = [entry for entry, positions in enumerate(held) if max(positions) >= 0]
    return sorted(live, key=place)[: min(limit, shape.chosen)]


def wanted(shape: ReadShape, limit: Tensor, drawn: tuple[Tensor, Tensor, Tensor], recent: int) -> list[list[list[int]]]:
    """The positions that each row and head reads, entry by entry."""
    score, positions, length = drawn
    held = by_entry(shape, positions)
    need = need_of(score, (held < 0).all(-1), SINGLE_RANK)
    found: list[list[list[int]]] = []
    for row, most in enumerate(limit.tolist()):
        found.append([])
        for head, pages in enumerate(held[row].tolist()):
            first = min((position for page in pages for position in page if position >= 0), default=0)
            entries = slow(shape, most, need[row, head].tolist(), pages, first, int(length[row]), recent)
            found[-1].append([position for entry in entries for position in pages[entry] if position >= 0])
    return found


def read(shape: ReadShape, limit: Tensor, drawn: tuple[Tensor, Tensor, Tensor], recent: int, **more: Any) -> Any:
    score, positions, length = drawn
    found = choose(shape, limit, by_score(score), positions, length, recent, **more)
    kept = found.chosen & (positions.gather(-1, found.slots) >= 0)
    slots = [[slots[own] for slots, own in zip(*of_row, strict=True)] for of_row in zip(found.slots, kept, strict=True)]
    places = [
        [positions[row, head][own].tolist() for head, own in enumerate(of_row)] for row, of_row in enumerate(slots)
    ]
    return places, slots


@pytest.mark.usefixtures("blocks")
@product("kind,shape,recent", KINDS, READ_SHAPES, [1, 9])
def test_the_most_needed_entries_are_read(shape: ReadShape, kind: str, recent: int) -> None:
    drawn = draw(shape, kind)
    one = drawn[0][:1, :1], drawn[1][:1, :1], drawn[2][:1]
    most = torch.tensor([shape.chosen])
    assert read(shape, most, one, recent)[0] == wanted(shape, most, one, recent)
    for limit in (torch.full((3,), shape.chosen), torch.tensor([1, max(shape.chosen // 2, 1), 1])):
        want = wanted(shape, limit, drawn, recent)
        assert read(shape, limit, drawn, recent)[0] == want
        places, slots = read(shape, limit, drawn, recent, in_slots_order=True)
        assert [[sorted(one) for one in row] for row in places] == [[sorted(one) for one in row] for row in want]
        assert all(torch.equal(one, one.sort().values) for row in slots for one in row)


@pytest.mark.usefixtures("blocks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("shape", [READ_SHAPES[1], pytest.param(READ_SHAPES[3], marks=pytest.mark.slow)])
def test_compiled_choices_are_the_same(shape: ReadShape) -> None:
    torch.compiler.reset()

    def chosen(score: Tensor, positions: Tensor, length: Tensor, in_order: bool) -> Any:
        return choose(shape, limit, by_score(score), positions, length, 1, in_order)

    compiled: Any = torch.compile(chosen, fullgraph=True, dynamic=False)
    limit = torch.tensor([shape.chosen, 3, 1])
    for kind in ("ties", "equal"):  # needs that differ clearly, or not at all, however they are rounded
        drawn = draw(shape, kind)
        for in_order in (False, True):
            want = chosen(*drawn, in_order)
            got = compiled(*drawn, in_order)
            assert torch.equal(got.chosen, want.chosen)
            assert torch.equal(got.slots[got.chosen], want.slots[want.chosen])
    torch.compiler.reset()
