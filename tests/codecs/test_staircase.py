"""Staircase: the sizes of its stages, and what a token goes through."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from kvpolicy.codecs.staircase import Staircase
from kvpolicy.protocols import ModelInfo
from tests.codecs import stages
from tests.codecs.stages import at, draw, empty, error, flags

C = 12
D = 16
SIZE = 4


def made(**fields: Any) -> Staircase:
    return Staircase(**{"tokens_8bit": 6, "tokens_4bit": 8, "group_size": SIZE, "residual_length": 3} | fields)


@pytest.mark.parametrize("fields", [{}, {"tokens_8bit": 1, "tokens_4bit": 1}, {"group_size": 1, "residual_length": 0}])
def test_no_stage_shrinks_and_all_tokens_have_room(fields: dict[str, int]) -> None:
    codec = made(**fields)
    layouts = [codec.layout(tokens) for tokens in range(120)]
    for tokens, layout in enumerate(layouts):
        assert layout.slots >= tokens
        assert all(size % codec.group_size == 0 for size in layout.coded)
        if layout.coded:
            assert sum(layout.coded) - (tokens - codec.traits_for(tokens).residual) in range(codec.group_size)
    coded = [layout.coded or (0, 0, 0) for layout in layouts]
    assert all(more >= less for a, b in pairwise(coded) for less, more in zip(a, b, strict=True))


def test_a_token_loses_with_each_stage() -> None:
    codec = made()
    keys, values = draw(C, D)
    now = (keys, values)
    errors = list[float]()
    for stage in codec.stages:
        store = empty(stage, C, D)
        stage.write(store, *now, at(range(C)), flags([True] * C), flags([False] * C))
        now = stages.read(stage, store, C)
        errors.append(error(now[0], keys))
    assert errors[0] < 1e-4 < errors[1] < 0.01 < errors[2] < 0.5


def test_head_dimension_must_fill_bytes() -> None:
    made().check(ModelInfo(1, 1, 12))
    with pytest.raises(ValueError, match=r"head dimension must be a multiple of 4 for Staircase, got 10"):
        made().check(ModelInfo(1, 1, 10))
