"""Windows of queries and sums of attention from tiles and chunks, against those of the whole prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.statistics import AttentionSum, Coming, NewestQueries, RecentQueries, Tile
from kvpolicy.statistics.windows import QueryWindow, ScoreTransform, together, window_attention
from tests.engine.parts import candidates_of, generator, newest_queries

CHUNKED = [[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1], [0, 1, 1, 0, 1, 0, 1]]
VALID = torch.tensor(CHUNKED).bool()
QUERIES, KEYS = (torch.randn(4, heads, 7, 8, generator=generator(heads)) for heads in (4, 2))


class Every(RecentQueries):
    """The newest queries of each chunk."""

    def newest(self, window: QueryWindow) -> QueryWindow:
        return window


def joined(kind: type[RecentQueries], first: int, width: int) -> QueryWindow:
    chunks = [kind(width, window(part, width)) for part in (slice(first), slice(first, None))]
    return chunks[0].joined(chunks[1], first).window


def window(columns: slice, width: int) -> QueryWindow:
    return newest_queries(QUERIES[:, :, columns], VALID[:, columns], width)


def same(found: QueryWindow, expected: QueryWindow) -> None:
    assert found.at.tolist() == expected.at.tolist()
    present = (expected.at >= 0)[:, None, :, None].expand_as(expected.queries)
    assert torch.equal(found.queries[present], expected.queries[present])


@pytest.mark.parametrize("width", [1, 3, 5, 9])
@pytest.mark.parametrize("first", [1, 4, 6])
def test_the_newest_of_two_chunks_are_those_of_the_whole(first: int, width: int) -> None:
    same(joined(RecentQueries, first, width), window(slice(None), width))


@pytest.mark.parametrize("width", [1, 3, 9])
@pytest.mark.parametrize("first", [1, 4, 6])
def test_joined_windows_have_all_queries_of_both(first: int, width: int) -> None:
    """Absent ones stay absent, wherever they stand."""
    both = joined(Every, first, width)
    for b, row in enumerate(both.at.tolist()):
        for place, column in enumerate(row):
            assert column < 0 or torch.equal(both.queries[b, :, place], QUERIES[b, :, column])
        chunks = (range(first), range(first, 7))
        newest = [[column for column in part if CHUNKED[b][column]][-width:] for part in chunks]
        assert [column for column in row if column >= 0] == newest[0] + newest[1]


@pytest.mark.parametrize("size", [1, 2, 5, 7])
def test_tiles_give_the_window_of_the_whole(size: int) -> None:
    expected = window(slice(None), 3)
    found = RecentQueries(3).begun(Coming(VALID, 7, torch.zeros(4, dtype=torch.int64), None))
    for start in range(0, 7, size):
        at = slice(start, min(start + size, 7))
        found = found.added(Tile(QUERIES[:, :, at], KEYS[:, :, at], start, VALID[:, at], size >= 7))
    assert found.window is not None
    same(found.window, expected)
    moved = found.map_rows(lambda t: t.flip(0)).window
    assert moved is not None
    same(moved, QueryWindow(*(t.flip(0) for t in expected)))


@pytest.mark.parametrize("kind", [NewestQueries, RecentQueries])
@pytest.mark.parametrize("first", [1, 4, 6])
def test_what_selectors_see_of_two_chunks(first: int, kind: Any) -> None:
    """The newest queries, or their attention."""

    def gather(start: int, stop: int) -> Any:
        at = slice(start, stop)
        coming = Coming(VALID[:, at], stop - start, VALID[:, :start].sum(-1), None)
        return kind(3).begun(coming).added(Tile(QUERIES[:, :, at], KEYS[:, :, at], 0, VALID[:, at], True))

    found = gather(0, first).joined(gather(first, 7), first)
    seen = found.reduced(candidates_of(KEYS, VALID, ScoreTransform(0.5)))
    whole = window(slice(None), 3)
    if kind is NewestQueries:
        same(whole._replace(queries=seen), whole)
    else:
        assert torch.equal(seen.weights, window_attention(whole, KEYS, ScoreTransform(0.5), None, VALID))
    assert found.reads_past is (kind is RecentQueries)
    assert len([*found.tensors]) == 2 and not [*kind(3).tensors]


def test_sums_of_chunks_are_added_column_by_column() -> None:
    """Nothing is known before attention."""
    first = torch.rand(2, 4, 3)
    second = torch.rand(2, 4, 7)
    found = AttentionSum(first).joined(AttentionSum(second), 3)
    assert found.total is not None
    assert torch.equal(found.total[..., 3:], second[..., 3:])
    assert torch.equal(found.total[..., :3], second[..., :3] + first)
    candidates = candidates_of(torch.zeros(2, 2, 7, 4), None, ScoreTransform(1.0))
    assert found.reduced(candidates) is found.total
    assert not found.reads_past and [*found.tensors] == [found.total]
    assert AttentionSum().joined(AttentionSum(), 3) == AttentionSum().map_rows(torch.clone) == AttentionSum()


def test_query_heads_of_two_layers_stand_together_by_their_kv_head() -> None:
    """Those of the second layer last."""
    first = torch.tensor([[10, 11, 20, 21]])[..., None]
    second: Tensor = torch.tensor([[100, 200]])[..., None]
    assert together(first, second, 2).squeeze(-1).tolist() == [[10, 11, 100, 20, 21, 200]]
