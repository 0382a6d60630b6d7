"""Attention to slots part by part: coded ones by stage, rotated where keys are coded unrotated."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.columns import CodedColumns, StageColumns
from kvpolicy.engine.partial_attention import attend_occupied, has_parts
from kvpolicy.kernels.rotary import Rope, SlotRotary
from kvpolicy.protocols import StageStore
from kvpolicy.statistics.windows import ScoreTransform
from tests.engine.parts import Floats, Uncoded, generator
from tests.sampling import product

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


def test_what_has_parts() -> None:
    t = torch.randn(1, HEADS, 3, DIM)
    assert has_parts(t, t, t, ScoreTransform(1.0))
    assert not has_parts(t, t, t.half(), ScoreTransform(1.0))
    assert not has_parts(t, t, t, ScoreTransform(1.0, softcap=3.0))
    assert not has_parts(t, t, t, ScoreTransform(1.0, sinks=torch.zeros(HEADS)))


@product("softcap,occupancy,counted", [None, 1.5], [None, [True] * 6 + [False] * 3], [False, True])
def test_attention_to_occupied_slots(softcap: float | None, occupancy: list[bool] | None, counted: bool) -> None:
    """With the normalizer, against fp64; by the fused function where nothing is masked, counted or capped."""
    q, keys, values = (torch.randn(1, HEADS, n, DIM, generator=generator(i)) for i, n in enumerate((5, 9, 9)))
    counts = torch.rand(1, HEADS, 9, generator=generator(3)) if counted else None
    occupied = None if occupancy is None else torch.tensor(occupancy).expand(1, HEADS, 9)
    found = attend_occupied(q, (keys, values), (), occupied, ScoreTransform(0.4, softcap), counts)
    score = q.double() @ keys.double().mT * 0.4
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    if counts is not None:
        score = score + counts.double()[:, :, None]
    if occupied is not None:
        score = score.masked_fill(~occupied[:, :, None], -torch.inf)
    torch.testing.assert_close(found.output.double(), score.softmax(-1) @ values.double(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.normalizer.double(), score.logsumexp(-1), atol=1e-6, rtol=1e-5)
