"""Windows of queries from tiles and chunks, against those of the whole prompt."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.statistics import Coming, RecentQueries, Tile
from kvpolicy.statistics.windows import QueryWindow
from tests.engine.parts import generator, newest_queries

CHUNKED = [[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1], [0, 1, 1, 0, 1, 0, 1]]
VALID = torch.tensor(CHUNKED).bool()
QUERIES = torch.randn(4, 4, 7, 8, generator=generator(0))


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
        tile = Tile(QUERIES[:, :, at], QUERIES[:, :2, at], start, VALID[:, at], size >= 7)
        found = found.added(tile)
    assert found.window is not None
    same(found.window, expected)


def test_rows_of_a_window_are_mapped() -> None:
    def turned(t: Tensor) -> Tensor:
        return t.flip(0)

    one = window(slice(None), 2)
    found = RecentQueries(2, one).map_rows(turned).window
    assert found is not None
    assert torch.equal(found.queries, one.queries.flip(0)) and torch.equal(found.at, one.at.flip(0))
