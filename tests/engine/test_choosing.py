"""A layer chooses what a list of its entries, sorted by need, has first; eager and compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.engine.reading import ReadShape, by_entry, choose, need_of
from kvpolicy.kernels import largest as module
from kvpolicy.protocols import SINGLE_RANK
from tests.sampling import product

LENGTH = 500
KINDS = ["random", "ties", "equal", "broken"]
SHAPES = [
    ReadShape(1, 1, ((0, 300),)),
    ReadShape(1, 15, ((0, 300),)),
    ReadShape(1, 299, ((0, 300),)),
    ReadShape(4, 6, ((0, 299),)),
    ReadShape(3, 5, ((5, 100), (105, 195))),
]


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are ranked in blocks, few as they are."""
    monkeypatch.setattr(module, "_FEWEST", 1)


def draw(shape: ReadShape, kind: str, heads: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, positions, and lengths of three rows: a full one, one with empty slots, and one without a token."""
    generator = torch.Generator().manual_seed(shape.entries + shape.chosen)
    slots = shape.parts[-1][0] + shape.parts[-1][1]
    score = torch.randn(3, heads, 2, shape.entries, generator=generator)
    if kind == "ties":
        score = score.round()
    elif kind == "equal":
        score = torch.zeros_like(score)
    elif kind == "broken":
        some = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e38])
        score = some[torch.randint(0, 4, score.shape, generator=generator)]
    order = [torch.randperm(LENGTH, generator=generator)[:slots] for _ in range(3 * heads)]
    positions = torch.stack(order).view(3, heads, slots).int()
    positions[:, :, 7] = torch.where((positions == LENGTH - 1).any(-1), positions[:, :, 7], LENGTH - 1)
    empty = torch.rand(3, heads, slots, generator=generator) < torch.tensor([0.0, 0.9, 1.0])[:, None, None]
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
    for row in range(len(limit)):
        found.append([])
        for head in range(positions.shape[1]):
            every = [position for position in positions[row, head].tolist() if position >= 0]
            pages: list[list[int]] = held[row, head].tolist()
            entries = slow(
                shape,
                int(limit[row]),
                need[row, head].tolist(),
                pages,
                min(every, default=0),
                int(length[row]),
                recent,
            )
            found[-1].append([position for entry in entries for position in pages[entry] if position >= 0])
    return found


def read(shape: ReadShape, limit: Tensor, drawn: tuple[Tensor, Tensor, Tensor], recent: int, **more: Any) -> Any:
    score, positions, length = drawn
    found = choose(shape, limit, partial(need_of, score, ranks=SINGLE_RANK), positions, length, recent, **more)
    kept = found.chosen & (positions.gather(-1, found.slots) >= 0)
    slots = [[slots[own] for slots, own in zip(*of_row, strict=True)] for of_row in zip(found.slots, kept, strict=True)]
    places = [
        [positions[row, head][own].tolist() for head, own in enumerate(of_row)] for row, of_row in enumerate(slots)
    ]
    return places, slots


@product("kind,shape,recent", KINDS, SHAPES, [1, 9])
def test_the_most_needed_entries_are_read(shape: ReadShape, kind: str, recent: int) -> None:
    drawn = draw(shape, kind)
    for limit in (torch.full((3,), shape.chosen), torch.tensor([1, max(shape.chosen // 2, 1), 1])):
        want = wanted(shape, limit, drawn, recent)
        assert read(shape, limit, drawn, recent)[0] == want
        places, slots = read(shape, limit, drawn, recent, in_slots_order=True)
        assert [[sorted(one) for one in row] for row in places] == [[sorted(one) for one in row] for row in want]
        assert all(torch.equal(one, one.sort().values) for row in slots for one in row)


@pytest.mark.parametrize("kind", KINDS)
def test_one_head_and_one_row(kind: str) -> None:
    shape = SHAPES[1]
    drawn = draw(shape, kind, heads=1)
    one = drawn[0][:1], drawn[1][:1], drawn[2][:1]
    assert read(shape, torch.tensor([15]), one, 1)[0] == wanted(shape, torch.tensor([15]), one, 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("shape", [SHAPES[1], pytest.param(SHAPES[3], marks=pytest.mark.slow)])
def test_compiled_choices_are_the_same(shape: ReadShape) -> None:
    torch.compiler.reset()

    def by_score(score: Tensor, positions: Tensor, length: Tensor, in_order: bool) -> Any:
        return choose(shape, limit, partial(need_of, score, ranks=SINGLE_RANK), positions, length, 1, in_order)

    compiled: Any = torch.compile(by_score, fullgraph=True, dynamic=False)
    limit = torch.tensor([shape.chosen, 3, 1])
    for kind in ("ties", "equal"):  # needs that differ clearly, or not at all, however they are rounded
        drawn = draw(shape, kind)
        for in_order in (False, True):
            want = by_score(*drawn, in_order)
            got = compiled(*drawn, in_order)
            assert torch.equal(got.chosen, want.chosen)
            assert torch.equal(got.slots[got.chosen], want.slots[want.chosen])
    torch.compiler.reset()
