"""Buffers that grow keep what they hold, stage by stage."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvpolicy.engine.layout import cleared, fix_addresses, grown_codes, grown_layout, grown_slots, grown_state
from kvpolicy.engine.state import tensors
from kvpolicy.protocols import Layout
from tests.conformance.fakes import Fake
from tests.engine.parts import Worth, generator

LAYOUTS = [Layout(0), Layout(1), Layout(5), Layout(3, (4,)), Layout(6, (2,)), Layout(2, (0, 7)), Layout(2, (3, 1))]


def test_a_layout_is_the_larger_one_stage_by_stage() -> None:
    for old, wanted in itertools.product(LAYOUTS, LAYOUTS):
        grown = grown_layout(old, wanted)
        assert grown.exact == max(old.exact, wanted.exact)
        for stage in range(3):
            sizes = [layout.coded[stage] if stage < len(layout.coded) else 0 for layout in (old, wanted, grown)]
            assert sizes[2] == max(sizes[:2])
        assert grown_layout(grown, old) == grown_layout(grown, wanted) == grown


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


def test_codes_are_carried_over() -> None:
    codec = Fake(caps=(4,), block=2, group_size=2)
    old = tuple(stage.alloc(2, 3, 4, 5, "cpu") for stage in codec.stages[:1])
    for number, t in enumerate(tensors(old)):
        t.copy_(torch.randn(t.shape, generator=generator(number)))
    before = [t.clone() for t in tensors(old)]
    grown = grown_codes(codec, old, (6, 2), (2, 3, 5), torch.device("cpu"))
    assert len(grown) == 2 and type(grown[0]) is type(old[0])
    for source, target in zip(before, tensors(grown[0]), strict=True):
        assert torch.equal(target[:, :, : source.shape[2]], source)
        assert not target[:, :, source.shape[2] :].any()
    fresh = codec.stages[1].alloc(2, 3, 2, 5, "cpu")
    for target, empty in zip(tensors(grown[1]), tensors(fresh), strict=True):
        assert torch.equal(target, empty)
    assert not grown_codes(codec, (), (), (2, 3, 5), torch.device("cpu"))


def test_addresses_are_fixed_without_a_guard() -> None:
    """A guard would compile the step again for every cache."""
    parts = [torch.zeros(2), Worth(torch.zeros(1), torch.zeros(1)), ()]
    fix_addresses(parts)
    marks = [getattr(t, "_dynamo_static_input_type", None) for part in parts for t in tensors(part)]
    assert marks == ["unguarded"] * 3


def test_a_cleared_state_is_zero_where_the_mask_is_set() -> None:
    state = Worth(torch.full((1, 2, 3), 5.0), torch.full((1, 2, 3), 7))
    mask = torch.tensor([[[True, False, False], [False, False, True]]])
    got = cleared(state, mask)
    assert got.worth.tolist() == [[[0, 5, 5], [5, 5, 0]]] and got.number.tolist() == [[[0, 7, 7], [7, 7, 0]]]
    assert state.worth.min() == 5, "the old state stays"
