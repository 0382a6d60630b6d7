"""Limits of rows: each is that of a row by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy.codecs.kivi import KIVI
from kvpolicy.codecs.plain import Plain
from kvpolicy.engine.row_limits import RowLimits, alloc_limits, has_dictionary, is_pinned, pin_tokens, with_tokens
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


@pytest.mark.parametrize("codec", [Fake(residual=3), Fake(caps=(4, 2)), KIVI(group_size=4, residual_length=5)])
def test_a_row_gets_the_slots_that_it_would_have_alone(codec: Any) -> None:
    tokens = [1, 4, 9, 10, 40, 200]
    together = with_tokens(limits_of(codec, len(tokens)), codec, tokens, 0)
    for row, count in enumerate(tokens):
        alone = with_tokens(limits_of(codec, 1), codec, [count], 0)
        layout = codec.layout(count)
        threshold = layout.exact if sum(layout.coded) else BEYOND
        assert together.flush_threshold[row].tolist() == alone.flush_threshold[0].tolist() == [threshold]
        capacity = [*layout.coded, *[0] * (len(codec.stages) - len(layout.coded))]
        assert together.stage_capacity[row].tolist() == alone.stage_capacity[0].tolist() == capacity


def test_rows_with_a_dictionary_have_a_smaller_buffer() -> None:
    codec = Fake(pins="newest", pinned=2)
    limits = limits_of(codec, 3)
    limits.pins[0, 0, 1] = 7
    limits.pins[1, 0, 0] = 0
    exact = codec.layout(50).exact
    assert with_tokens(limits, codec, [50, 50, 50], 2).flush_threshold.tolist() == [[exact - 2], [exact - 2], [exact]]
    assert has_dictionary(limits).flatten().tolist() == [False, True, False], "the first one is there, or none"


POSITIONS = torch.tensor([[-1, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [6, 7, 8, -1, -1, -1]], dtype=torch.int32)
FIRST = torch.tensor([True, True, False])


@pytest.mark.parametrize("pins", ["first", "massive"])
def test_tokens_of_the_first_prompt_are_pinned(pins: Any) -> None:
    """A row that had tokens before keeps its pins."""
    codec = Fake(pins=pins, pinned=2)
    limits = limits_of(codec, 3)
    limits.pins[2, 0] = torch.tensor([4, -1])
    massive = torch.tensor([[1, 1, 0, 1, 0, 0], [0, 1, 0, 0, 0, 1], [1, 1, 0, 0, 0, 0]]).bool()
    pin_tokens(limits, codec.traits, POSITIONS, massive, FIRST)
    want = [{0, 1}, {0, 1}] if pins == "first" else [{1}, {1, 5}]
    for row, positions in enumerate([*want, {4}]):
        found = {int(p) for p in limits.pins[row, 0].tolist() if p >= 0}
        assert found == positions, row


@pytest.mark.parametrize(("pins", "pinned"), [("none", 0), ("newest", 2)])
def test_other_codecs_pin_nothing_here(pins: Any, pinned: int) -> None:
    codec = Fake(pins=pins, pinned=pinned)
    limits = limits_of(codec, 3)
    pin_tokens(limits, codec.traits, POSITIONS, None, FIRST)
    assert (limits.pins < 0).all()


def test_a_prompt_shorter_than_the_pins() -> None:
    codec = Fake(pins="first", pinned=4)
    limits = limits_of(codec, 1)
    pin_tokens(limits, codec.traits, torch.tensor([[0, 1]], dtype=torch.int32), None, torch.tensor([True]))
    assert sorted(limits.pins.flatten().tolist()) == [-1, -1, 0, 1]


def test_which_positions_are_pinned() -> None:
    limits = limits_of(Fake(pins="newest", pinned=2), 2)
    limits.pins.copy_(torch.tensor([[[3, 5], [0, -1]], [[-1, -1], [9, 2]]]))
    positions = torch.tensor([0, 2, 3, 5, 9], dtype=torch.int32)
    got = is_pinned(limits, positions.expand(2, HEADS, 5))
    for b in range(2):
        for h in range(HEADS):
            assert got[b, h].tolist() == [p in limits.pins[b, h].tolist() for p in positions.tolist()]
