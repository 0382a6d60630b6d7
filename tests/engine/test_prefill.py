"""What is kept of a prompt until its budget is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kvpolicy.engine.attention import Past, QueryWindow, ScoreTransform, largest_queries, newest_queries
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.reading import AbsoluteSums, absolute_sums
from kvpolicy.engine.state import tensors
from kvpolicy.protocols import Forward, QueryMoments
from tests.engine.parts import generator

WINDOW = QueryWindow(torch.zeros(3, 4, 2, 8), torch.zeros(3, 2, dtype=torch.int64))
VALID = [[True] * 5, [False, False, True, True, True], [True, False, True, False, False]]


def prompt(valid: Any = None, **more: Any) -> PendingPrompt:
    keys, values = torch.zeros(3, 2, 5, 8), torch.ones(3, 2, 5, 8)
    return PendingPrompt(keys, values, None if valid is None else torch.tensor(valid), ScoreTransform(1.0), **more)


@pytest.mark.parametrize("seen", [[0, 0, 0], [4, 0, 9]])
@pytest.mark.parametrize("valid", [None, VALID, [[False] * 5, [True] * 5, [False] * 5]])
def test_rows_are_counted_without_padding(valid: list[list[bool]] | None, seen: list[int]) -> None:
    one = prompt(valid)
    flags = valid or [[True] * 5] * 3
    positions: list[list[int]] = []
    for row, start in zip(flags, seen, strict=True):
        count, found = start, list[int]()
        for there in row:
            found.append(count if there else -1)
            count += there
        positions.append(found)
    assert one.positions(torch.tensor(seen)).tolist() == positions
    assert one.positions(torch.tensor(seen)).dtype == torch.int32
    assert one.lengths(torch.tensor(seen)).tolist() == [
        start + sum(row) for row, start in zip(flags, seen, strict=True)
    ]


def test_idle_rows_have_nothing_but_padding() -> None:
    assert prompt().idle is None
    idle = prompt([[False] * 5, [False, True, False, False, False], [False] * 5]).idle
    assert idle is not None and idle.tolist() == [True, False, True]


def test_what_reads_the_slots_before_it() -> None:
    assert not prompt().reads_past and not prompt(attn_sum=torch.zeros(3, 4, 5)).reads_past
    forward = Forward(nn.Identity(), torch.zeros(3, 5, 16), {})
    for more in ({"window": WINDOW}, {"probes": WINDOW}, {"forward": forward}):
        assert prompt(**more).reads_past


CHUNKED = [[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1], [0, 1, 1, 0, 1, 0, 1]]


@pytest.mark.parametrize("width", [1, 3, 5, 9])
@pytest.mark.parametrize("first", [1, 4, 6])
def test_chunks_are_joined_to_the_whole_prompt(first: int, width: int) -> None:
    """Rows begin and end in any chunk, and have padding between their tokens."""
    valid = torch.tensor(CHUNKED).bool()
    q = torch.randn(4, 4, 7, 8, generator=generator(0))
    keys = torch.randn(4, 2, 7, 8, generator=generator(1))

    def chunk(columns: slice) -> PendingPrompt:
        own = newest_queries(q[:, :, columns], valid[:, columns], width)
        return PendingPrompt(
            keys[:, :, columns],
            -keys[:, :, columns],
            valid[:, columns],
            ScoreTransform(1.0),
            window=own,
            probes=own,
            below_mean=own,
            query_absmax=largest_queries(q[:, :, columns], 2, valid[:, columns]),
        )

    whole, joined = chunk(slice(None)), chunk(slice(first)).joined(chunk(slice(first, None)), width, width)
    for name in ("keys", "values", "valid", "query_absmax"):
        assert torch.equal(getattr(joined, name), getattr(whole, name)), name
    for name in ("window", "below_mean"):
        want, got = getattr(whole, name), getattr(joined, name)
        assert got.at.tolist() == want.at.tolist()
        for b, h, w in (want.at >= 0)[:, None].expand(-1, 4, -1).nonzero().tolist():
            assert torch.equal(got.queries[b, h, w], want.queries[b, h, w])
    # Probes of both chunks are kept, wherever the absent ones stand.
    assert joined.probes is not None
    for b, row in enumerate(joined.probes.at.tolist()):
        for place, column in enumerate(row):
            assert column < 0 or torch.equal(joined.probes.queries[b, :, place], q[b, :, column])
        chunks = (range(first), range(first, 7))
        newest = [[column for column in part if CHUNKED[b][column]][-width:] for part in chunks]
        assert [column for column in row if column >= 0] == newest[0] + newest[1]


def test_sums_are_those_of_all_chunks() -> None:
    q, k = (torch.randn(3, heads, 7, 8, generator=generator(heads)) for heads in (4, 2))
    valid = torch.tensor(CHUNKED[:3]).bool()
    parts = [absolute_sums(q[:, :, at], k[:, :, at], valid[:, at]) for at in (slice(3), slice(3, 7))]
    first, second = (prompt(sums=part) for part in parts)
    joined = first.joined(second, 1, 1).sums
    assert joined is not None
    for found, whole in zip(joined, absolute_sums(q, k, valid), strict=True):
        assert torch.allclose(found, whole)


def test_moments_are_those_of_all_chunks() -> None:
    first = QueryMoments(torch.ones(3), torch.ones(3, 2, 2, 8), torch.ones(3, 2, 2, 8, 8))
    second = QueryMoments(*(2 * t for t in first))
    joined = prompt(moments=first).joined(prompt(moments=second), 1, 1)
    assert joined.moments is not None
    assert all(bool((t == 3).all()) for t in joined.moments)


def test_the_next_chunk_sees_what_slots_before_a_prompt_count_for() -> None:
    counts = torch.rand(3, 2, 4, generator=generator(0))
    past = Past(torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 8), torch.ones(3, 2, 4, dtype=torch.bool), counts)
    after = prompt(VALID).after(past)
    assert after.counts is not None
    assert torch.equal(after.counts, torch.cat([counts, torch.zeros(3, 2, 5)], -1)), "each new token is one"
    assert prompt(VALID).after(past._replace(counts=None)).counts is None


def test_a_window_does_not_keep_a_prompt_alive() -> None:
    queries = newest_queries(torch.randn(3, 4, 50, 8), None, 2).queries
    assert queries.untyped_storage().nbytes() == queries.nbytes


def test_rows_are_selected_everywhere() -> None:
    """Every tensor has the row in its numbers, and follows it."""
    rows = torch.arange(3.0)

    def of(*shape: int) -> torch.Tensor:
        return rows.view(3, *[1] * len(shape)).expand(3, *shape).clone()

    window = QueryWindow(of(4, 2, 8), of(2).long())
    pending = PendingPrompt(
        of(2, 5, 8),
        of(2, 5, 8),
        torch.tensor([[True] * 5, [False] * 5, [True] * 5]),
        ScoreTransform(1.0),
        attn_sum=of(4, 5),
        window=window,
        probes=QueryWindow(*(t + 10 for t in window)),
        below_mean=QueryWindow(*(t + 20 for t in window)),
        moments=QueryMoments(of(), of(2, 2, 8), of(2, 2, 8, 8)),
        query_absmax=of(2, 8),
        replay=of(2, 5),
        sums=AbsoluteSums(of(4, 8), of(2, 8)),
    )
    index = torch.tensor([2, 0, 2, 1])
    moved = pending.map_rows(lambda t: t[index])
    found = 0
    for before, after in zip(pending, moved, strict=True):
        if isinstance(before, torch.Tensor | QueryWindow | QueryMoments | AbsoluteSums):
            for old, new in zip(tensors(before), tensors(after), strict=True):
                assert torch.equal(new, old[index])
                found += 1
    assert found == 17


def test_it_owns_its_memory_without_copying_twice() -> None:
    whole = torch.randn(3, 2, 50, 8)
    one = prompt()._replace(keys=whole[:, :, :5])
    own = one.owned()
    assert torch.equal(own.keys, one.keys)
    assert own.keys.untyped_storage().nbytes() == own.keys.nbytes
    assert own.values.data_ptr() == one.values.data_ptr(), "what has memory of its own is not copied"


def test_later_changes_of_the_callers_mask_do_not_count() -> None:
    one = prompt(VALID)
    own = one.owned()
    assert one.valid is not None and own.valid is not None
    one.valid.fill_(True)
    assert own.valid.tolist() == VALID


def test_bytes_are_those_of_every_tensor() -> None:
    keys = 3 * 2 * 5 * 8 * 4
    assert prompt().nbytes == 2 * keys
    window = WINDOW.queries.nbytes + WINDOW.at.nbytes
    forward = Forward(nn.Identity(), torch.zeros(3, 5, 16), {}, queries=torch.zeros(3, 4, 5, 8))
    more: dict[str, Any] = {
        "attn_sum": torch.zeros(3, 4, 5),
        "window": WINDOW,
        "probes": WINDOW,
        "query_absmax": torch.zeros(3, 2, 8),
        "forward": forward,
    }
    extra = 3 * 4 * 5 * 4 + 2 * window + 3 * 2 * 8 * 4 + 3 * 5 * 16 * 4 + 3 * 4 * 5 * 8 * 4
    assert prompt(VALID, **more).nbytes == 2 * keys + 15 + extra
