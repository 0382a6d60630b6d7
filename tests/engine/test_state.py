"""Nested states of selectors, and the bytes of a layer by kind."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.state import (
    bytes_by_kind,
    empty_slots,
    join_states,
    map_slots,
    map_state,
    select_rows,
    select_state,
    slot_tensors,
    tensors,
)
from kvpolicy.protocols import scoped


class Inner(NamedTuple):
    total: Tensor


class Outer(NamedTuple):
    score: Tensor
    base: Inner
    rest: tuple[Tensor, ...]


def state(slots: int, start: float) -> Outer:
    def part(offset: int, dtype: torch.dtype) -> Tensor:
        return (torch.arange(6 * slots).view(2, 3, slots) + start + 100 * offset).to(dtype)

    return Outer(part(0, torch.float32), Inner(part(1, torch.int64)), (part(2, torch.float64), part(3, torch.int32)))


def flat(given: Any) -> list[list[Any]]:
    return [t.tolist() for t in tensors(given)]


def test_tensors_come_in_order() -> None:
    one = state(2, 0)
    assert [t.dtype for t in tensors(one)] == [torch.float32, torch.int64, torch.float64, torch.int32]
    assert [t.data_ptr() for t in tensors(one)] == [
        one.score.data_ptr(),
        one.base.total.data_ptr(),
        one.rest[0].data_ptr(),
        one.rest[1].data_ptr(),
    ]
    assert [*tensors(())] == [] and [*tensors(one.score)] == [one.score]


def test_a_mapped_state_has_the_same_classes() -> None:
    one = state(2, 0)
    double = map_state(lambda t: t * 2, one)
    assert type(double) is Outer and type(double.base) is Inner and type(double.rest) is tuple
    assert flat(double) == [(t * 2).tolist() for t in tensors(one)]
    assert map_state(lambda t: t * 2, ()) == ()


@scoped(anchor="head", seen="row")
class Mixed(NamedTuple):
    score: Tensor
    anchor: Tensor
    seen: Tensor


class Wrapped(NamedTuple):
    mark: Tensor
    base: Mixed


def mixed(slots: int, start: float) -> Wrapped:
    """A state of 2 rows and 3 heads, with tensors of every scope inside another."""
    one = torch.arange(6 * slots).view(2, 3, slots) + start
    anchor = torch.arange(24).view(2, 3, 4) + start
    return Wrapped(one, Mixed(one + 100, anchor, torch.tensor([1.0, 2.0]) + start))


def test_only_slots_are_gathered_and_joined() -> None:
    first = mixed(2, 0)
    second = mixed(3, 50)
    joined = join_states(first, second)
    assert [t.shape[-1] for t in slot_tensors(joined)] == [5, 5]
    assert joined.base.anchor is first.base.anchor and joined.base.seen is first.base.seen
    order = torch.tensor([1, 0]).expand(2, 3, -1)
    moved = map_slots(lambda t: t.gather(-1, order), first)
    assert type(moved.base) is Mixed and moved.base.score.tolist() == first.base.score.flip(-1).tolist()
    assert moved.base.anchor is first.base.anchor and moved.base.seen is first.base.seen


def test_a_mask_of_slots_leaves_the_rest_and_a_mask_of_rows_does_not() -> None:
    first = mixed(2, 0)
    second = mixed(2, 50)
    by_slot = select_state(torch.tensor([True, False])[:, None, None], first, second)
    assert by_slot.base.anchor is first.base.anchor and by_slot.mark[1].tolist() == second.mark[1].tolist()
    by_row = select_rows(torch.tensor([True, False]), first, second)
    for got, one, other in zip(tensors(by_row), tensors(first), tensors(second), strict=True):
        assert got[0].tolist() == one[0].tolist() and got[1].tolist() == other[1].tolist()


def test_empty_slots_have_the_dtypes_and_the_heads() -> None:
    one = mixed(2, 5)
    empty = empty_slots(one, 7)
    assert [t.shape for t in slot_tensors(empty)] == [(2, 3, 7)] * 2 and not any(t.any() for t in slot_tensors(empty))
    assert empty.base.anchor is one.base.anchor and empty.mark.dtype == one.mark.dtype
    assert len([*tensors(one)]) == 4 and len([*slot_tensors(one)]) == 2


class Stage(NamedTuple):
    keys: Tensor
    key_scale: Tensor
    values: Tensor
    zero_of_values: Tensor


def numbers(count: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(count, dtype=dtype)


def test_kinds_follow_the_names_of_fields() -> None:
    stage = Stage(numbers(7, torch.uint8), numbers(5, torch.float16), numbers(3, torch.int8), numbers(1, torch.float32))
    other = Stage(*(torch.empty(0) for _ in range(4)))
    state = (numbers(2, torch.float32), (numbers(3, torch.uint8),))
    found = bytes_by_kind(
        [numbers(4, torch.bfloat16), numbers(6, torch.float32)],
        [stage, other, stage],
        numbers(9, torch.int32),
        state,
        [numbers(1, torch.int64), numbers(0, torch.int64)],
    )
    assert found == {
        "exact": 4 * 2 + 6 * 4,
        "codes": 2 * (7 + 3),
        "scales": 2 * (5 * 2 + 4),
        "positions": 36,
        "statistics": 8 + 3,
        "index": 0,
        "counters": 8,
    }


def test_nothing_is_no_bytes() -> None:
    found = bytes_by_kind([], [], torch.empty(0, dtype=torch.int32), (), [])
    assert set(found.values()) == {0} and len(found) == 7
