"""States are nested tuples of tensors, which are mapped, joined and selected part by part."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.state import join_states, map_state, select_state, tensors


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
        one.score.data_ptr(), one.base.total.data_ptr(), one.rest[0].data_ptr(), one.rest[1].data_ptr()
    ]  # fmt: skip
    assert [*tensors(())] == [] and [*tensors(one.score)] == [one.score]


def test_a_mapped_state_has_the_same_classes() -> None:
    one = state(2, 0)
    double = map_state(lambda t: t * 2, one)
    assert type(double) is Outer and type(double.base) is Inner and type(double.rest) is tuple
    assert flat(double) == [(t * 2).tolist() for t in tensors(one)]
    assert map_state(lambda t: t * 2, ()) == ()


def test_states_are_joined_along_the_slots() -> None:
    first, second = state(2, 0), state(3, 50)
    joined = join_states(first, second)
    assert type(joined) is Outer
    for got, one, other in zip(tensors(joined), tensors(first), tensors(second), strict=True):
        assert got.dtype == one.dtype and got.tolist() == torch.cat([one, other], -1).tolist()
    assert join_states((), ()) == ()


def test_a_mask_selects_between_two_states() -> None:
    first, second = state(4, 0), state(4, 50)
    mask = torch.tensor([True, False])[:, None, None]
    found = select_state(mask, first, second)
    for got, one, other in zip(tensors(found), tensors(first), tensors(second), strict=True):
        assert got[0].tolist() == one[0].tolist() and got[1].tolist() == other[1].tolist()
