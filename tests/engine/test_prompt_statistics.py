"""Which queries of a prompt are kept, and what is summed, whatever pieces they come in."""

from __future__ import annotations

import pytest
import torch

from kvpolicy import MiKV, Plain, SnapKV
from kvpolicy.engine.attention import ScoreTransform
from kvpolicy.engine.prompt_statistics import PromptStatistics, prompt_needs
from kvpolicy.engine.store import LayerStore
from kvpolicy.mergers.regress import Regress
from tests.engine.parts import generator


def test_needs_are_those_of_the_selector_and_of_the_merger() -> None:
    regress = Regress()
    store = LayerStore(0, SnapKV(window=3), Plain(), "evict", merger=regress)
    assert prompt_needs(store).window_queries == max(3, regress.needs.window_queries)


@pytest.mark.parametrize("pieces", [[10], [1, 9], [4, 4, 2], [9, 1]])
def test_the_newest_queries_of_each_row_are_kept(pieces: list[int]) -> None:
    valid = torch.tensor([[1] * 10, [0, 1, 1, 0, 1, 0, 0, 0, 0, 0], [0] * 9 + [1]]).bool()
    q, k = (torch.randn(3, heads, 10, 4, generator=generator(heads)) for heads in (4, 2))
    store = LayerStore(0, SnapKV(window=3), Plain(), "evict")
    store.initialize(k, group=2)
    statistics = PromptStatistics(store, valid, 10)
    start = 0
    for size in pieces:
        statistics.add(q[:, :, start : start + size], k[:, :, start : start + size], start)
        start += size
    window = statistics.prompt(k, k, ScoreTransform(1.0), None, None).window
    assert window is not None and window.at.tolist() == [[7, 8, 9], [1, 2, 4], [-1, -1, 9]]
    for row, columns in enumerate(window.at.tolist()):
        for place, column in enumerate(columns):
            if column >= 0:
                assert torch.equal(window.queries[row, :, place], q[row, :, column])


def test_the_largest_queries_of_all_pieces() -> None:
    q = torch.zeros(1, 2, 6, 2)
    q[0, 0, 1, 0], q[0, 1, 4, 1] = -7, 5
    q[0, 0, 0, 0] = 99  # of padding
    valid = torch.tensor([[0, 1, 1, 1, 1, 1]]).bool()
    store = LayerStore(0, SnapKV(window=1), MiKV(), "evict")
    store.initialize(q[:, :1], group=2)
    statistics = PromptStatistics(store, valid, 6)
    for start in (0, 3):
        statistics.add(q[:, :, start : start + 3], q[:, :1, start : start + 3], start)
    assert statistics.absmax is not None and statistics.absmax.tolist() == [[[7, 5]]]
