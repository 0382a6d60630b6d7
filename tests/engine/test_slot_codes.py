"""Slots as they are read: the buffer, the stages behind it, and the dictionary."""

from __future__ import annotations

import torch

from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.slot_codes import SlotCodes
from kvpolicy.protocols import Layout
from tests.conformance.fakes import Fake
from tests.engine.parts import Ranking, slots_of

ROWS = 2
HEADS = 3
DIM = 4


def codes_of(codec: Fake, tokens: int) -> tuple[LayerStore, SlotCodes]:
    """A layer with empty slots for so many tokens."""
    layer = LayerStore(LayerSpec(0, Ranking(), codec))  # pyright: ignore[reportArgumentType]
    layer.initialize(torch.zeros(ROWS, HEADS, 5, DIM))
    layer.contents.expect([tokens] * ROWS, None)
    slots_of(layer)._grow_slots()
    layer.tensors.keys = layer.tensors.keys.new_zeros(ROWS, HEADS, layer.layout.exact, DIM)
    layer.tensors.values = layer.tensors.keys.clone()
    layer.contents.set_budget(torch.full((ROWS,), tokens))
    return layer, SlotCodes(layer.contents)


def test_a_layer_without_slots_has_no_past() -> None:
    layer = LayerStore(LayerSpec(0, Ranking(), Fake(residual=9)))  # pyright: ignore[reportArgumentType]
    layer.initialize(torch.zeros(ROWS, HEADS, 5, DIM))
    codes = SlotCodes(layer.contents)
    assert codes.past() is None and codes.view() is None and codes.atoms() is None


def test_stages_stand_behind_the_buffer() -> None:
    layer, codes = codes_of(Fake(caps=(4,), block=2, residual=1), 12)
    exact, (first, second) = layer.layout
    assert codes.stage_slots(0) == slice(exact, exact + first)
    assert codes.stage_slots(1) == slice(exact + first, exact + first + second)
    view = codes.view()
    assert view is not None and [each.size for each in view] == [size for size in (first, second) if size]
    assert codes.stage_store(1).codes is layer.tensors.codes[1]


def test_tokens_of_the_buffer_are_counted_by_head() -> None:
    layer, codes = codes_of(Fake(caps=(4,), block=2, residual=1), 12)
    exact = layer.layout.exact
    layer.tensors.positions[0, 1, :2] = torch.tensor([5, 6], dtype=torch.int32)
    layer.tensors.positions[0, 1, exact] = 4  # coded
    assert codes.buffered().tolist() == [[0, 2, 0], [0, 0, 0]]
    assert bool(codes.open_slots().all()) and codes.open_slots().shape[-1] == exact
    assert codes.buffer().positions.shape == (ROWS, HEADS, exact)


def test_keys_stay_as_they_are_where_they_are_coded_rotated() -> None:
    layer, codes = codes_of(Fake(residual=99), 6)
    keys = torch.randn(ROWS, HEADS, 2, DIM)
    assert layer.layout == Layout(layer.layout.exact) and codes.in_key_space(keys, torch.zeros(1)) is keys
