"""One statistic of each class for several parts, and results by their classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy import KVPolicyError
from kvpolicy.selectors.blocks import BlockAttention
from kvpolicy.selectors.probe import ProbeQueries
from kvpolicy.statistics import (
    AttentionSum,
    GeneratedAttention,
    NewestQueries,
    RecentQueries,
    ReplayedRows,
    Results,
    Statistic,
    Vectors,
    union,
)
from kvpolicy.statistics.statistic import first_of


def test_the_widest_of_each_class_serves_all() -> None:
    for kind in (RecentQueries, NewestQueries, ReplayedRows):
        for widths in ((3, 8, 5), (8, 3, 5), (3, 5, 8)):
            assert union(*((kind(width),) for width in widths)) == (kind(8),)
            assert union(kind(width) for width in widths) == (kind(8),), "also within one part"
    assert union((RecentQueries(3),), (NewestQueries(8),)) == (RecentQueries(3), NewestQueries(8))


def test_what_one_part_asks_more_of_is_asked_for_all() -> None:
    for more, less in (
        (Vectors(generated=True), Vectors()),
        (GeneratedAttention(of_all_slots=True), GeneratedAttention()),
    ):
        for groups in ([more, less], [less, more], [more, more]):
            assert union(groups) == (more,)
        assert union([less, less]) == (less,)


def test_they_stand_in_the_order_in_which_they_are_asked_for() -> None:
    first = (GeneratedAttention(), RecentQueries(4))
    second = (AttentionSum(), RecentQueries(9), Vectors())
    assert union(first, second) == (GeneratedAttention(), RecentQueries(9), AttentionSum(), Vectors())
    assert union(second, first) == (AttentionSum(), RecentQueries(9), Vectors(), GeneratedAttention())
    assert union() == union((), ()) == () and union(first) == first


def test_of_others_the_first_serves_all() -> None:
    for one, other in (
        (BlockAttention(16, 4), BlockAttention(8)),
        (ProbeQueries(0.1, 0.0, 1), ProbeQueries(0.2, 0.1, 0)),
    ):
        assert union((one,), (other,)) == (one,) and union((other,), (one,)) == (other,)


def test_results_are_found_by_class() -> None:
    sums = torch.ones(1, 2, 3)
    seen = Results({AttentionSum: sums, BlockAttention: None})
    assert seen[AttentionSum] is sums and seen.get(AttentionSum) is sums and AttentionSum in seen
    assert seen.get(RecentQueries) is None and RecentQueries not in seen
    assert BlockAttention in seen and seen.get(BlockAttention) is None
    with pytest.raises(KVPolicyError, match=r"hand over RecentQueries in statistics .*; try \(RecentQueries\(\),\)"):
        seen[RecentQueries]
    with pytest.raises(KVPolicyError, match="must hand over AttentionSum in statistics"):
        Results()[AttentionSum]


def test_what_is_found_later_does_not_change_results() -> None:
    found: dict[type[Statistic[Any]], Any] = {AttentionSum: torch.ones(1)}
    seen = Results(found)
    found.clear()
    assert AttentionSum in seen


def test_the_first_of_a_class() -> None:
    asked = (AttentionSum(), RecentQueries(3), RecentQueries(5))
    assert first_of(RecentQueries, asked) is asked[1] and first_of(Vectors, asked) is None
