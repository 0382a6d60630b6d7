"""Limits of rows: each is that of a row by itself."""

from __future__ import annotations

from typing import Any

from kvpolicy.codecs.plain import Plain
from kvpolicy.engine.row_limits import RowLimits, alloc_limits, has_dictionary, with_tokens
from kvpolicy.engine.token_batch import BEYOND
from tests.conformance.fakes import Fake
from tests.sampling import product

HEADS = 2
DIM = 4


def limits_of(codec: Any, rows: int) -> RowLimits:
    limits = alloc_limits(codec, rows, HEADS, DIM, "cpu")
    assert limits is not None
    return limits


def test_a_codec_without_stages_has_none() -> None:
    assert alloc_limits(Plain(), 2, HEADS, DIM, "cpu") is None


@product("pins,query_absmax,key_space", ["none", "first", "massive", "newest"], [False, True], ["rotated", "unrotated"])
def test_what_a_codec_does_not_need_is_empty(pins: Any, query_absmax: bool, key_space: Any) -> None:
    pinned = 0 if pins == "none" else 3
    pin_heads = HEADS if pins == "newest" else 1
    codec = Fake(caps=(4,), pins=pins, pinned=pinned, query_absmax=query_absmax, key_space=key_space)
    limits = limits_of(codec, 2)
    assert limits.flush_threshold.tolist() == [[BEYOND]] * 2, "nothing is demoted before a budget is known"
    assert limits.stage_capacity.tolist() == [[0, 0]] * 2
    assert limits.pins.tolist() == [[[-1] * pinned] * pin_heads] * 2
    assert limits.rope_offset.tolist() == [0] * (2 if key_space == "unrotated" else 0)
    assert [each.shape for each in limits.statistics] == [(2, HEADS, DIM)] * query_absmax
    assert [each.shape for each in limits_of(Fake(query_squares=3), 2).statistics] == [(2, HEADS, DIM)]


def test_rows_with_a_dictionary_have_a_smaller_buffer() -> None:
    codec = Fake(pins="newest", pinned=2)
    limits = limits_of(codec, 3)
    limits.pins[0, 0, 1] = 7
    limits.pins[1, 0, 0] = 0
    exact = codec.layout(50).exact
    assert with_tokens(limits, codec, [50, 50, 50], 2).flush_threshold.tolist() == [[exact - 2], [exact - 2], [exact]]
    assert has_dictionary(limits).flatten().tolist() == [False, True, False], "the first one is there, or none"
