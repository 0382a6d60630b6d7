"""The tensors of a layer: written, emptied, grown, selected by row and counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.codecs.tokenwise import TokenWise
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.slot_writer import write_masked
from kvpolicy.engine.state import tensors
from kvpolicy.engine.token_batch import SlotData
from kvpolicy.protocols import Layout, traits_for
from tests.conformance.fakes import Fake
from tests.engine.parts import Ranking, Worth, generator, slots_of

ROWS = 2
HEADS = 3
DIM = 4


def slots(codec: Any, tokens: int) -> LayerStore:
    """A layer with empty slots for so many tokens."""
    layer = LayerStore(LayerSpec(0, Ranking(), codec))  # pyright: ignore[reportArgumentType]
    layer.initialize(torch.zeros(ROWS, HEADS, 5, DIM))
    layer.contents.expected_len = [tokens] * ROWS
    layer.contents.capacity = tokens
    slots_of(layer)._grow_slots()
    exact = layer.layout.exact
    layer.tensors.keys, layer.tensors.values = (torch.zeros(ROWS, HEADS, exact, DIM) for _ in range(2))
    layer.contents.set_budget(torch.full((ROWS,), tokens))
    return layer


def data(positions: Tensor) -> SlotData:
    """Tokens whose parts all say which position they have."""
    keys = positions[..., None].expand(*positions.shape, DIM).float()
    return SlotData(keys, -keys, positions.to(torch.int32), Worth(positions / 2, positions.long()))


def write(
    layer: LayerStore, at: Tensor, tokens: SlotData | None, mask: Tensor | None, stage: int | None = None
) -> None:
    slots_of(layer).writer.write(at, tokens, mask, stage)


def rows_of(layer: LayerStore) -> list[Tensor]:
    """The tensors of a layer that have rows."""
    held = layer.tensors
    assert held.limits is not None
    slots = [held.keys, held.values, held.positions, *tensors(held.state), *tensors(held.codes)]
    return [*slots, held.length, held.budget, *(t for t in tensors(held.limits) if t.shape[0])]


PLAIN = Fake(residual=99)
CODED = Fake(caps=(4,), block=2, residual=1)


def test_a_new_layer_has_no_slots() -> None:
    layer = LayerStore(LayerSpec(3, Ranking(), PLAIN))  # pyright: ignore[reportArgumentType]
    assert layer.nbytes == 0 and "empty" in repr(layer)
    layer.initialize(torch.zeros(ROWS, HEADS, 5, DIM, dtype=torch.bfloat16))
    assert (
        layer.tensors.keys.shape == layer.tensors.values.shape == (ROWS, HEADS, 0, DIM)
        and layer.tensors.keys.dtype == torch.bfloat16
    )
    assert layer.tensors.positions.shape == (ROWS, HEADS, 0) and layer.contents.expected_len == [0] * ROWS
    assert layer.past() is None and slots_of(layer).codes.view() is None
    assert layer.layout == Layout(0) and "layer_idx=3, rows=2, heads=3, slots=0, exact=0" in repr(layer)


@pytest.mark.parametrize("masked", [False, True])
def test_what_is_written_is_in_its_slot_and_nothing_else_changes(masked: bool) -> None:
    layer = slots(PLAIN, 6)
    write(layer, torch.arange(6).expand(ROWS, HEADS, 6), data(torch.arange(100, 106).expand(ROWS, HEADS, 6)), None)
    at = torch.tensor([[[1, 4]] * HEADS, [[5, 0]] * HEADS])
    mask = torch.rand(ROWS, HEADS, 2, generator=generator(0)) < 0.5 if masked else torch.ones(ROWS, HEADS, 2).bool()
    write(layer, at, data(torch.tensor([7, 8]).expand(ROWS, HEADS, 2)), mask if masked else None)
    for b in range(ROWS):
        for h in range(HEADS):
            want = [*range(100, 106)]
            for n, token in enumerate((7, 8)):
                if mask[b, h, n]:
                    want[int(at[b, h, n])] = token
            assert layer.tensors.positions[b, h].tolist() == layer.tensors.state.number[b, h].tolist() == want
            assert layer.tensors.keys[b, h, :, 0].tolist() == (-layer.tensors.values[b, h, :, 1]).tolist() == want
            assert layer.tensors.state.worth[b, h].tolist() == [position / 2 for position in want]


def test_slots_are_emptied_by_their_positions_alone() -> None:
    layer = slots(PLAIN, 4)
    write(layer, torch.arange(4).expand(ROWS, HEADS, 4), data(torch.arange(4).expand(ROWS, HEADS, 4)), None)
    keys = layer.tensors.keys.clone()
    mask = torch.tensor([[[True], [False], [True]], [[False]] * HEADS])
    write(layer, torch.full((ROWS, HEADS, 1), 2), None, mask)
    assert layer.tensors.positions.tolist() == [
        [[0, 1, -1 if mask[b, h, 0] else 2, 3] for h in range(HEADS)] for b in range(ROWS)
    ]
    assert torch.equal(layer.tensors.keys, keys)


def test_a_stage_codes_what_is_written_to_it() -> None:
    layer = slots(CODED, 12)
    exact = layer.layout.exact
    first, second = layer.layout.coded
    assert first and second
    mask = torch.ones(ROWS, HEADS, 1).bool()
    mask[0, 1] = False
    write(layer, torch.ones(ROWS, HEADS, 1, dtype=torch.int64), data(torch.full((ROWS, HEADS, 1), 3)), mask, 0)
    write(layer, torch.zeros(ROWS, HEADS, 1, dtype=torch.int64), data(torch.full((ROWS, HEADS, 1), 5)), mask, 1)
    past = layer.past()
    assert past is not None and past.keys.shape[2] == layer.layout.slots
    for b in range(ROWS):
        for h in range(HEADS):
            there = bool(mask[b, h])
            want = [-1] * layer.layout.slots
            want[exact + 1] = 3 if there else -1
            want[exact + first] = 5 if there else -1
            assert layer.tensors.positions[b, h].tolist() == want
            assert past.occupied[b, h].tolist() == [position >= 0 for position in want]
            if there:
                assert past.keys[b, h, [exact + 1, exact + first], 0].tolist() == [3, 5]
                assert past.values[b, h, [exact + 1, exact + first], 0].tolist() == [-3, -5]


def test_a_layer_that_grows_keeps_its_tokens() -> None:
    layer = slots(CODED, 12)
    exact = layer.layout.exact
    write(layer, torch.arange(exact).expand(ROWS, HEADS, -1), data(torch.arange(exact).expand(ROWS, HEADS, -1)), None)
    one = torch.zeros(ROWS, HEADS, 1, dtype=torch.int64)
    write(layer, one, data(torch.full((ROWS, HEADS, 1), 50)), torch.ones(ROWS, HEADS, 1).bool(), 1)
    old = layer.layout
    layer.contents.capacity = 30
    slots_of(layer)._lengthen()
    assert layer.layout.slots > old.slots
    start = layer.layout.starts()[1]
    for b in range(ROWS):
        for h in range(HEADS):
            want = [-1] * layer.layout.slots
            want[:exact] = range(exact)
            want[start] = 50
            assert layer.tensors.positions[b, h].tolist() == want
            assert layer.tensors.keys[b, h, :exact, 0].tolist() == [*range(exact)]
            assert layer.tensors.state.number[b, h, start] == 50
            assert layer.tensors.state.number[b, h, :exact].tolist() == [*range(exact)]
            assert layer.tensors.state.worth[b, h, :exact].tolist() == [position / 2 for position in range(exact)]
    past = layer.past()
    assert past is not None and past.keys[..., start, 0].tolist() == [[50.0] * HEADS] * ROWS


def test_rows_are_selected_everywhere() -> None:
    layer = slots(CODED, 12)
    exact = layer.layout.exact
    positions = torch.arange(ROWS * HEADS * exact).view(ROWS, HEADS, exact)
    write(layer, torch.arange(exact).expand(ROWS, HEADS, -1), data(positions), None)
    layer.contents.expected_len = [12, 9]
    layer.tensors.length.copy_(torch.tensor([40, 50]))
    before = [t.clone() for t in rows_of(layer)]
    index = torch.tensor([1, 1, 0])
    layer.map_rows(lambda t: t.index_select(0, index))
    assert layer.contents.expected_len == [9, 9, 12]
    for old, new in zip(before, rows_of(layer), strict=True):
        assert torch.equal(new, old[[1, 1, 0]])


def test_every_tensor_is_counted() -> None:
    layer = slots(CODED, 12)
    assert layer.nbytes == sum(t.nbytes for t in [*rows_of(layer), layer.tensors.columns])
    assert sum(layer.nbytes_by_kind().values()) == layer.nbytes


@pytest.mark.parametrize("budgets", [[1000, 1000], [8, 300], [300, 8]], ids=str)
def test_limits_are_those_of_the_tokens_that_a_row_may_hold(budgets: list[int]) -> None:
    """A budget beyond the tokens that are announced changes nothing; a block is as large as that of the longest row."""
    codec = TokenWise()
    layer = slots(codec, 0)
    layer.contents.expected_len = [10, 300]
    layer.contents.set_budget(torch.tensor(budgets))
    want = [traits_for(codec, min(pair)) for pair in zip(budgets, layer.contents.expected_len, strict=True)]
    assert layer.tensors.limits is not None
    assert layer.tensors.limits.block.flatten().tolist() == [traits.block for traits in want]
    assert layer.tensors.limits.residual.flatten().tolist() == [traits.residual for traits in want]
    assert layer.contents.largest_block == max(traits.block for traits in want)
    if budgets[0] > 300:
        assert want[0].block < want[1].block


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_another_dtype_is_refused(dtype: torch.dtype) -> None:
    layer = slots(PLAIN, 4)
    keys = torch.zeros(ROWS, HEADS, 1, DIM, dtype=dtype)
    if dtype == torch.float32:
        layer.contents.check_compatible(keys, keys)
        return
    for pair in ((keys, keys.float()), (keys.float(), keys)):
        with pytest.raises(ValueError, match=r"must be torch.float32 on cpu like the cache, got torch.float16 on cpu"):
            layer.contents.check_compatible(*pair)


def test_tensors_of_inference_mode_are_replaced() -> None:
    with torch.inference_mode():
        layer = slots(CODED, 12)
    assert layer.tensors.keys.is_inference()
    before = layer.tensors.positions.clone()
    layer.leave_inference_mode()
    assert not any(t.is_inference() for t in [*rows_of(layer), layer.tensors.columns] if t.numel())
    assert torch.equal(layer.tensors.positions, before)


def test_a_masked_write_leaves_what_the_slot_holds() -> None:
    target = torch.arange(12.0).view(1, 2, 6)
    slots = torch.tensor([[[0, 3], [5, 1]]])
    write_masked(
        "keys", target, slots, torch.full((1, 2, 2), -1.0), torch.tensor([[[True, False], [False, True]]]), None
    )
    assert target.tolist() == [[[-1, 1, 2, 3, 4, 5], [6, -1, 8, 9, 10, 11]]]
