"""Attention over pages where numbers are extreme; `test_coded_pages.py` has it against the slow version."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.engine.page_attention import BufferedPages, ExactPages, attend_pages
from kvpolicy.engine.pages import Owners
from kvpolicy.protocols import ALONE
from kvpolicy.statistics.windows import ScoreTransform

ROWS = 2
HEADS = 3
PAGES = 9
SIZE = 4
DIM = 8


def pages(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, occupied slots and owners in random order, with empty slots and unused pages."""
    dice = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(ROWS, PAGES, SIZE, DIM, generator=dice) for _ in range(2))
    order = torch.rand(ROWS, PAGES, generator=dice).argsort(-1)
    owner = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 2, 2, HEADS, HEADS, HEADS, HEADS]]).gather(1, order)
    occupied = torch.rand(ROWS, PAGES, SIZE, generator=dice) < 0.7
    occupied[..., 0] = True
    return keys, values, occupied & (owner < HEADS)[..., None], owner


def owners(owner: Tensor, heads: int = HEADS) -> Owners:
    """The owners of pages as a step of one layer has them."""
    return Owners.of(owner, heads, ALONE.once)


def test_a_row_without_a_token_is_no_nan() -> None:
    keys, values, occupied, owner = pages(0)
    occupied[1] = False
    q = torch.ones(ROWS, HEADS, 1, DIM)
    found = attend_pages(q, ExactPages(keys, values), ~occupied, owners(owner), ScoreTransform(1.0))
    assert found.out[1].eq(0).all() and found.weights[1].eq(0).all()
    assert found.out[0].isfinite().all()


def test_empty_slots_may_hold_any_number() -> None:
    keys, values, occupied, owner = pages(1)
    keys = keys.masked_fill(~occupied[..., None], 1e4)
    q = torch.ones(ROWS, HEADS, 1, DIM)
    one = attend_pages(q, ExactPages(keys, values), ~occupied, owners(owner), ScoreTransform(1.0))
    other = attend_pages(
        q,
        ExactPages(keys.masked_fill(~occupied[..., None], -3.0), values),
        ~occupied,
        owners(owner),
        ScoreTransform(1.0),
    )
    assert torch.equal(one.out, other.out)


@pytest.mark.parametrize("above", [-200.0, 0.0, 200.0])
def test_scores_of_a_buffer_may_be_far_from_those_of_pages(above: float) -> None:
    """Exponentials of their difference would be infinite."""
    keys = torch.ones(1, 1, SIZE, 1)
    values = torch.zeros(1, 1, SIZE, 1)
    buffer = torch.full((1, 1, SIZE, 1), 1 + above), torch.ones(1, 1, SIZE, 1)
    occupied = torch.ones(1, 2, SIZE, dtype=torch.bool)
    owner = torch.zeros(1, 2, dtype=torch.int64)
    pages = BufferedPages(ExactPages(keys, values), *buffer, SIZE)
    found = attend_pages(torch.ones(1, 1, 1, 1), pages, ~occupied, owners(owner, 1), ScoreTransform(1.0))
    want = {-200.0: 0.0, 0.0: 0.5, 200.0: 1.0}[above]
    assert found.out.flatten().tolist() == [want]
    assert found.weights.sum(-1).flatten().tolist() == [1 - want, want]
