"""ChunkKV: chunks of neighbors, the same in all heads."""

from __future__ import annotations

import pytest

from kvpolicy import KVPolicyError, Policy
from kvpolicy.selectors.chunk import ChunkState
from tests.conformance.bench import Bench, draw, padding


def test_heads_keep_the_same_tokens_and_whole_chunks() -> None:
    bench = Bench("chunk:size=5/h2o:recent=0.0", [16, 16])
    bench.forward(*draw(60, 0, batch=2), padding(60, 60, 41))
    for first, second in bench.turns[-1].kept:
        assert first == second
        older = first[:-1]  # the newest token is always kept
        whole = [
            chunk for chunk in {position // 5 for position in older} if len([p for p in older if p // 5 == chunk]) == 5
        ]
        assert len(whole) >= 2
    bench.check()


def test_the_last_chunk_goes_token_by_token() -> None:
    """While decoding: generated tokens rank above all chunks, and of the lowest chunk the last token goes first."""
    bench = Bench("chunk:size=4/h2o:recent=0.0", [13])
    bench.forward(*draw(40, 1))
    before = bench.turns[-1].kept[0][0]
    state = bench.layer.tensors.state
    assert isinstance(state, ChunkState)
    for number in range(6):
        bench.forward(*draw(1, 50 + number))
    after = bench.turns[-1].kept[0][0]
    assert [p for p in after if p >= 40] == [*range(40, 46)] and len([p for p in after if p < 40]) == 7
    assert set(after) - set(range(40, 46)) < set(before)
    bench.check()


def test_heads_are_not_compared() -> None:
    with pytest.raises(KVPolicyError, match="compares_heads is not True"):
        Policy.parse("uniform/adakv+chunk/h2o@0.5")
    assert str(Policy.parse("uniform/even+chunk/h2o@0.5")) == "uniform/even+chunk/h2o@0.5"
