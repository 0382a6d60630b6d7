"""Coded slots as attention reads them: stage by stage, rotated where keys are coded unrotated."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.columns import CodedColumns, StageColumns
from kvpolicy.kernels.rotary import Rope, SlotRotary
from kvpolicy.protocols import StageStore
from tests.engine.parts import Floats, Uncoded, generator

ROWS = 2
HEADS = 3
GROUP = 2
DIM = 4


class Shift(Rope):
    """An embedding that adds the position to every number: what is rotated twice, or not at all, is seen."""

    def __init__(self) -> None:
        super().__init__(None, None, None)

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        return keys.float() + positions[..., None]


def part(size: int, seed: int, rope: SlotRotary | None = None) -> StageColumns:
    keys, values = (torch.randn(ROWS, HEADS, size, DIM, generator=generator(seed + side)) for side in (0, 100))
    return StageColumns(Uncoded(), StageStore(Floats(keys, values, torch.zeros(ROWS, HEADS, size, 1))), rope, size)


def rotary(size: int) -> SlotRotary:
    positions = torch.arange(ROWS * HEADS * size).view(ROWS, HEADS, size)
    return SlotRotary(Shift(), positions, torch.tensor([50, 60]), torch.tensor([0, 1000]))


def seen_keys(given: StageColumns) -> Tensor:
    """The keys of a part as attention sees them."""
    if given.rope is None:
        return given.store.codes.keys
    positions = torch.arange(ROWS * HEADS * given.size).view(ROWS, HEADS, given.size)
    return given.store.codes.keys + (positions + torch.tensor([0, 1000])[:, None, None])[..., None]


def test_every_stage_is_scored_and_mixed_by_itself() -> None:
    parts = [part(5, 1), part(1, 2, rotary(1)), part(3, 3, rotary(3))]
    queries = torch.randn(ROWS, HEADS, GROUP, DIM, generator=generator(9))
    known = torch.randn(ROWS, HEADS, GROUP, 9, generator=generator(8))
    for one, products in zip(CodedColumns(parts).known(known), known.split([5, 1, 3], -1), strict=True):
        assert torch.equal(one.score(queries), products), "what is known is not computed again"
    for one in parts:
        want = torch.einsum("bhgd,bhcd->bhgc", queries, seen_keys(one))
        torch.testing.assert_close(one.score(queries), want)
        weights = torch.rand(ROWS, HEADS, GROUP, one.size, generator=generator(one.size))
        torch.testing.assert_close(one.mix(weights), torch.einsum("bhgc,bhcd->bhgd", weights, one.store.codes.values))


def test_what_is_read_is_rotated_and_of_the_wanted_dtype() -> None:
    parts = [part(4, 1), part(2, 2, rotary(2))]
    for dtype in (torch.float32, torch.bfloat16):
        for (keys, values), one in zip(CodedColumns(parts).read(dtype), parts, strict=True):
            assert keys.dtype == values.dtype == dtype
            assert torch.equal(keys, seen_keys(one).to(dtype))
            assert torch.equal(values, one.store.codes.values.to(dtype))
