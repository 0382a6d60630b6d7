"""Attention over pages against a loop over heads in double precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
SINKS = torch.tensor([0.5, -1.0, 30.0, 2.0, -40.0, 0.0])


def pages(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, occupied slots and owners in random order, with empty slots and unused pages."""
    dice = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(ROWS, PAGES, SIZE, DIM, generator=dice) for _ in range(2))
    order = torch.rand(ROWS, PAGES, generator=dice).argsort(-1)
    owner = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 2, 2, HEADS, HEADS, HEADS, HEADS]]).gather(1, order)
    occupied = torch.rand(ROWS, PAGES, SIZE, generator=dice) < 0.7
    occupied[..., 0] = True
    return keys, values, occupied & (owner < HEADS)[..., None], owner


def slow(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    occupied: Tensor,
    owner: Tensor,
    group: int,
    transform: ScoreTransform,
    pages: int = PAGES,
) -> tuple[Tensor, Tensor]:
    """The softmax of each query head over the slots of its own KV head, number by number."""
    out = torch.zeros(*q.shape, dtype=torch.float64)
    weights = torch.zeros(ROWS, pages, group, SIZE, dtype=torch.float64)
    for b in range(ROWS):
        for hq in range(q.shape[1]):
            places = [
                (page, slot)
                for page in range(pages)
                for slot in range(SIZE)
                if int(owner[b, page]) == hq // group and bool(occupied[b, page, slot])
            ]
            scores = [
                float(q[b, hq, 0].double() @ keys[b, page, slot].double()) * transform.scale for page, slot in places
            ]
            if transform.softcap:
                scores = [transform.softcap * math.tanh(score / transform.softcap) for score in scores]
            more = [] if transform.sinks is None else [float(transform.sinks[hq])]
            top = max(scores + more)
            whole = sum(math.exp(score - top) for score in scores + more)
            for (page, slot), score in zip(places, scores, strict=True):
                weights[b, page, hq % group, slot] = math.exp(score - top) / whole
                out[b, hq, 0] += weights[b, page, hq % group, slot] * values[b, page, slot].double()
    return out, weights


def owners(owner: Tensor, heads: int = HEADS) -> Owners:
    """The owners of pages as a step of one layer has them."""
    return Owners.of(owner, heads, ALONE.once)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("transform", [{}, {"softcap": 1.5}, {"sinks": True}, {"softcap": 3.0, "sinks": True}], ids=str)
def test_pages_are_attended_to_as_heads(group: int, transform: dict[str, Any]) -> None:
    if "sinks" in transform:
        transform = transform | {"sinks": SINKS[: HEADS * group]}
    how = ScoreTransform(0.4, **transform)
    for seed in range(3):
        given = pages(seed)
        q = 4 * torch.randn(ROWS, HEADS * group, 1, DIM, generator=torch.Generator().manual_seed(seed + 99))
        out, weights, _ = attend_pages(q, ExactPages(*given[:2]), ~given[2], owners(given[3]), how)
        expected, rows = slow(q, *given, group, how)
        torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(weights, rows.float(), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("transform", [{}, {"softcap": 3.0, "sinks": True}], ids=str)
def test_a_buffer_of_each_head_is_one_page_more(transform: dict[str, Any]) -> None:
    """Of 6 slots, which are a page of 4 and one that is used in part."""
    if "sinks" in transform:
        transform = transform | {"sinks": SINKS}
    keys, values, occupied, owner = pages(3)
    how = ScoreTransform(0.4, **transform)
    more = torch.randn(2, ROWS, HEADS, 6, DIM, generator=torch.Generator().manual_seed(3))
    there = torch.tensor([1, 0, 1, 1, 0, 1, 0, 0]).bool().view(1, 2, SIZE).repeat(ROWS, HEADS, 1)
    q = 4 * torch.randn(ROWS, HEADS * 2, 1, DIM, generator=torch.Generator().manual_seed(9))
    occupied = torch.cat([occupied, there], 1)
    owner = torch.cat([owner, torch.tensor([0, 0, 1, 1, 2, 2]).expand(ROWS, -1)], 1)
    stored = BufferedPages(ExactPages(keys, values), more[0], more[1], SIZE)
    out, weights, _ = attend_pages(q, stored, ~occupied, owners(owner), how)
    every = [
        torch.cat([t, F.pad(tail, (0, 0, 0, 2)).view(ROWS, 2 * HEADS, SIZE, DIM)], 1)
        for t, tail in zip((keys, values), more, strict=True)
    ]
    expected, rows = slow(q, every[0], every[1], occupied, owner, 2, how, PAGES + 2 * HEADS)
    torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(weights, rows.float(), atol=1e-6, rtol=1e-4)


def test_a_row_without_a_token_is_no_nan() -> None:
    keys, values, occupied, owner = pages(0)
    occupied[1] = False
    q = torch.ones(ROWS, HEADS, 1, DIM)
    out, weights, _ = attend_pages(q, ExactPages(keys, values), ~occupied, owners(owner), ScoreTransform(1.0))
    assert weights is not None
    assert out[1].eq(0).all() and weights[1].eq(0).all()
    assert out[0].isfinite().all()


def test_empty_slots_may_hold_any_number() -> None:
    keys, values, occupied, owner = pages(1)
    keys = keys.masked_fill(~occupied[..., None], 1e4)
    q = torch.ones(ROWS, HEADS, 1, DIM)
    out, _, _ = attend_pages(q, ExactPages(keys, values), ~occupied, owners(owner), ScoreTransform(1.0))
    other, _, _ = attend_pages(
        q,
        ExactPages(keys.masked_fill(~occupied[..., None], -3.0), values),
        ~occupied,
        owners(owner),
        ScoreTransform(1.0),
    )
    assert torch.equal(out, other)


@pytest.mark.parametrize("above", [-200.0, 0.0, 200.0])
def test_scores_of_a_buffer_may_be_far_from_those_of_pages(above: float) -> None:
    """Exponentials of their difference would be infinite."""
    keys = torch.ones(1, 1, SIZE, 1)
    values = torch.zeros(1, 1, SIZE, 1)
    buffer = torch.full((1, 1, SIZE, 1), 1 + above), torch.ones(1, 1, SIZE, 1)
    occupied = torch.ones(1, 2, SIZE, dtype=torch.bool)
    owner = torch.zeros(1, 2, dtype=torch.int64)
    pages = BufferedPages(ExactPages(keys, values), *buffer, SIZE)
    out, weights, _ = attend_pages(torch.ones(1, 1, 1, 1), pages, ~occupied, owners(owner, 1), ScoreTransform(1.0))
    want = {-200.0: 0.0, 0.0: 0.5, 200.0: 1.0}[above]
    assert out.flatten().tolist() == [want]
    assert weights is not None
    assert weights.sum(-1).flatten().tolist() == [1 - want, want]
