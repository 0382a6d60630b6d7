"""What is placed of a prompt is in the buffer or in a stage, once; what is demoted leaves the buffer."""

from __future__ import annotations

import torch

from kvpolicy.engine.slot_demoter import SlotDemoter, assign_slots
from kvpolicy.engine.slot_geometry import SlotGeometry
from kvpolicy.engine.token_batch import SlotData, TokenBatch
from kvpolicy.kernels.slot_writes import gather_slots
from tests.conformance.fakes import Fake
from tests.engine.parts import Worth, slots_of
from tests.engine.test_slot_codes import DIM, HEADS, ROWS, codes_of

TOKENS = 10


def batch() -> TokenBatch:
    """Tokens whose parts all say which position they have."""
    positions = torch.arange(TOKENS).expand(ROWS, HEADS, -1)
    keys = positions[..., None].expand(*positions.shape, DIM).float()
    chosen = torch.ones_like(positions, dtype=torch.bool)
    return TokenBatch(keys, -keys, positions.int(), Worth(positions / 2, positions.long()), chosen)


def is_full(slots: SlotGeometry) -> bool:
    """Whether a buffer of any row is full."""
    full = slots.full_rows()
    assert full is not None
    return bool(full.any())


def test_the_oldest_tokens_are_demoted_and_every_token_is_placed_once() -> None:
    layer, codes = codes_of(Fake(caps=(4,), block=2, residual=1), TOKENS)
    slots = slots_of(layer)
    demoter = SlotDemoter(layer.contents, codes, slots.writer, slots.index)
    data = demoter.place(batch(), None, None)
    assign_slots(layer.tensors, data)
    layer.tensors.keys = data.keys
    layer.tensors.values = data.values
    exact = layer.layout.exact
    past = codes.past()
    assert past is not None
    for head in layer.tensors.positions.flatten(0, 1):
        assert sorted(p for p in head.tolist() if p >= 0) == [*range(TOKENS)]
        coded = [p for p in head[exact:].tolist() if p >= 0]
        assert max(coded) < min(p for p in head[:exact].tolist() if p >= 0)
    positions = layer.tensors.positions.float()[..., None]
    assert torch.equal(past.keys[past.occupied], positions.expand(past.keys.shape)[past.occupied])
    assert not is_full(slots)


def test_slots_are_assigned_in_some_rows_only() -> None:
    layer, _ = codes_of(Fake(residual=99), TOKENS)
    data = batch().data
    rows = torch.tensor([True, False]).view(-1, 1, 1)
    assign_slots(layer.tensors, SlotData(*data), rows)
    assert layer.tensors.positions[0, 0, :TOKENS].tolist() == [*range(TOKENS)]
    assert bool((layer.tensors.positions[1] < 0).all())


def test_a_full_buffer_gives_up_its_oldest_block() -> None:
    layer, codes = codes_of(Fake(caps=(), block=2, residual=1), TOKENS)
    slots = slots_of(layer)
    exact = layer.layout.exact
    tokens = batch().window(0, exact)
    every = torch.arange(exact).expand(ROWS, HEADS, -1)
    slots.writer.write(every, tokens.data, None)
    assert is_full(slots)
    slots.demote()
    assert not is_full(slots)
    left = layer.tensors.positions[..., :exact]
    assert sorted(p for p in left[0, 0].tolist() if p >= 0) == [*range(layer.contents.largest_block, exact)]
    past = codes.past()
    assert past is not None
    moved = layer.tensors.positions[..., exact:].argsort(-1, descending=True)[..., :2] + exact
    assert sorted(gather_slots(past.keys, moved)[0, 0, :, 0].tolist()) == [0, 1]
