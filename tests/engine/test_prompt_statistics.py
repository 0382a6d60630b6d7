"""Which queries of a prompt are kept, and what is summed, whatever pieces they come in."""

from __future__ import annotations

import pytest
import torch

from kvpolicy import MiKV, Plain, Policy, SnapKV
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.prompt_statistics import PromptStatistics, wanted
from kvpolicy.hf.layer import make_store
from kvpolicy.mergers.regress import Regress
from kvpolicy.statistics.channel_sums import LargestQueries
from kvpolicy.statistics.recent_queries import RecentQueries
from kvpolicy.statistics.statistic import first_of
from kvpolicy.statistics.windows import ScoreTransform
from tests.engine.parts import generator


def test_statistics_are_those_of_the_selector_and_of_the_merger() -> None:
    regress = Regress()
    store = LayerStore(LayerSpec(0, SnapKV(window=3), Plain(), "evict", merger=regress))
    of_selector, of_merger, of_both = (
        first_of(RecentQueries, asked)
        for asked in (store.spec.selector.statistics, regress.statistics, store.spec.prompt_statistics)
    )
    assert of_selector is not None and of_merger is not None and of_both is not None
    assert of_selector.width == 3 and of_both.width == max(3, of_merger.width)


@pytest.mark.parametrize("pieces", [[10], [1, 9], [4, 4, 2], [9, 1]])
def test_the_newest_queries_of_each_row_are_kept(pieces: list[int]) -> None:
    valid = torch.tensor([[1] * 10, [0, 1, 1, 0, 1, 0, 0, 0, 0, 0], [0] * 9 + [1]]).bool()
    q, k = (torch.randn(3, heads, 10, 4, generator=generator(heads)) for heads in (4, 2))
    store = LayerStore(LayerSpec(0, SnapKV(window=3), Plain(), "evict"))
    store.initialize(k, group=2)
    statistics = PromptStatistics(store.contents, valid, 10)
    start = 0
    for size in pieces:
        statistics.add(q[:, :, start : start + size], k[:, :, start : start + size], start)
        start += size
    found = first_of(RecentQueries, statistics.prompt(k, k, ScoreTransform(1.0), None, None).statistics)
    assert found is not None and found.window is not None
    window = found.window
    assert window.at.tolist() == [[7, 8, 9], [1, 2, 4], [-1, -1, 9]]
    for row, columns in enumerate(window.at.tolist()):
        for place, column in enumerate(columns):
            if column >= 0:
                assert torch.equal(window.queries[row, :, place], q[row, :, column])


def test_the_largest_queries_of_all_pieces() -> None:
    q = torch.zeros(1, 2, 6, 2)
    q[0, 0, 1, 0] = -7
    q[0, 1, 4, 1] = 5
    q[0, 0, 0, 0] = 99  # of padding
    valid = torch.tensor([[0, 1, 1, 1, 1, 1]]).bool()
    store = LayerStore(LayerSpec(0, SnapKV(window=1), MiKV(), "evict"))
    store.initialize(q[:, :1], group=2)
    statistics = PromptStatistics(store.contents, valid, 6)
    for start in (0, 3):
        statistics.add(q[:, :, start : start + 3], q[:, :1, start : start + 3], start)
    found = first_of(LargestQueries, statistics.prompt(q[:, :1], q[:, :1], ScoreTransform(1.0), None, None).statistics)
    assert found is not None and found.absmax is not None and found.absmax.tolist() == [[[7, 5]]]


def test_a_prompt_has_the_statistics_that_its_parts_ask_for() -> None:
    k = torch.zeros(1, 1, 0, 4)

    def kinds(policy: str) -> list[str]:
        store = make_store(Policy.parse(policy), 0)
        store.initialize(k)
        return [type(each).__name__ for each in wanted(store.contents)]

    assert kinds("window@0.5") == []
    assert kinds("h2o@0.5") == ["AttentionSum", "GeneratedAttention"]
    assert kinds("snapkv+mikv@0.5") == ["RecentQueries", "LargestQueries"]
    assert kinds("kvcrush/probe@0.5") == ["ProbeQueries", "GeneratedAttention"]
    assert kinds("scissorhands@0.5") == ["BelowMean", "GeneratedAttention"]
    assert kinds("compactor@0.5") == ["Vectors", "UnrotatedKeys", "BlockAttention"]
    assert kinds("kvcrush/compactor@0.5") == ["Vectors", "UnrotatedKeys", "BlockAttention", "RecentQueries"]
