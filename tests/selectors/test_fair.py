"""FairEviction: every part of a prompt keeps the same share."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kvpolicy import FairEviction, KVPolicyError, Policy
from tests.conformance.bench import Bench, draw, padding


@pytest.mark.parametrize("budget", [9, 20, 37])
@pytest.mark.parametrize(("at", "begins"), [("20_50", [0, 20, 50, 60]), ("auto:parts=4", [0, 15, 30, 45, 60])])
def test_parts_keep_the_same_share(at: str, begins: list[int], budget: int) -> None:
    """To the nearest token, whatever the base prefers: here long keys, which are all in the first part."""
    q, k, v = draw(60, 0)
    k[:, :, :15] *= 0.01  # the base keeps short ones
    bench = Bench(f"fair:at={at}/knorm", [budget])
    bench.forward(q, k, v)
    for kept in bench.turns[-1].kept[0]:
        for first, last in pairwise(begins):
            count = sum(first <= position < last for position in kept)
            assert abs(count - budget * (last - first) / 60) <= 1.5
    bench.check()
    alone = Bench("knorm", [budget])
    alone.forward(q, k, v)
    assert all(sum(position < 15 for position in kept) >= min(14, budget - 1) for kept in alone.turns[-1].kept[0])


def test_one_part_keeps_what_the_base_keeps() -> None:
    q, k, v = draw(60, 1, batch=2)
    found = []
    for spec in ("fair:parts=1/snapkv:window=6", "snapkv:window=6"):
        bench = Bench(spec, [20, 14])
        bench.forward(q, k, v, padding(60, 60, 41))
        found.append(bench.turns[-1].kept)
    assert found[0] == found[1]


def test_parts_that_a_short_prompt_does_not_reach() -> None:
    bench = Bench("fair:at=30_90_500/h2o", [12])
    bench.forward(*draw(40, 2))
    for number in range(4):
        bench.forward(*draw(1, 50 + number))
    bench.check()


@pytest.mark.parametrize("at", ["", "0_5", "9_3", "3_3", "3,9", "x", "9_"])
def test_positions_that_do_not_ascend_are_refused(at: str) -> None:
    with pytest.raises(KVPolicyError, match=r"at must be auto or ascending positions from 1 on such as 120_300"):
        FairEviction(at=at)


def test_heads_are_not_compared() -> None:
    with pytest.raises(KVPolicyError, match="compares_heads is not True"):
        Policy.parse("uniform/adakv+fair/h2o@0.5")


def test_shares_of_equal_parts_are_exact() -> None:
    """Equal shares of two parts are equal numbers, of which the earlier token is kept."""
    q, k, v = draw(33, 3)
    bench = Bench("fair:at=11_22/h2o:recent=0.0", [10])
    bench.forward(torch.zeros_like(q), k, v)
    bench.check()
