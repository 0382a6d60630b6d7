"""Slots in order of their tokens are chosen by the length alone, as they are chosen by positions."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import kvpolicy
from kvpolicy.engine.reading import ReadShape, by_entry, choose, entry_slots, need_of
from kvpolicy.engine.reading_in_order import choose_in_order, held_by, slots_of
from kvpolicy.protocols import SINGLE_RANK, StepMemo
from kvpolicy_eval.bench.models import llama, tokens
from tests.sampling import product

SLOTS = 22
LENGTHS = torch.tensor([SLOTS, 21, 9, 1, 0])
"""Of rows: full ones, one with free slots, one with a token, and one without."""
SHAPES = [ReadShape(page, chosen, ((0, SLOTS),)) for page, chosen in ((1, 5), (2, 3), (4, 3), (4, 5), (11, 1))]


def positions(heads: int) -> torch.Tensor:
    slot = torch.arange(SLOTS)
    return torch.where(slot < LENGTHS[:, None, None], slot, -1).int().expand(-1, heads, -1)


@product("shape,kind,recent,sinks", SHAPES, ["random", "equal", "broken"], [0, 1, 6], [0, 3])
def test_the_same_is_chosen(shape: ReadShape, kind: str, recent: int, sinks: int) -> None:
    generator = torch.Generator().manual_seed(shape.chosen)
    score = torch.randn(len(LENGTHS), 2, 3, shape.entries, generator=generator)
    if kind == "equal":
        score.zero_()
    elif kind == "broken":
        score[:, :, :, ::2] = torch.tensor([torch.nan, torch.inf, -torch.inf])[:, None]
    needs = partial(need_of, score, ranks=SINGLE_RANK)
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
        assert got.entries is not None
        assert got.read is not None
        assert want.read is not None
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
