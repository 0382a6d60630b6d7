"""Staircase: the sizes of its stages, and what a token goes through."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from kvpolicy.codecs.kivi import KIVI
from kvpolicy.codecs.staircase import Staircase
from kvpolicy.protocols import Codec, ModelInfo, Stage
from tests.codecs import stages
from tests.codecs.stages import at, draw, empty, error, flags

C = 12
D = 16
SIZE = 4


def made(**fields: Any) -> Staircase:
    return Staircase(**{"tokens_8bit": 6, "tokens_4bit": 8, "group_size": SIZE, "residual_length": 3} | fields)


def test_it_is_a_codec_of_three_stages() -> None:
    codec = made()
    assert isinstance(codec, Codec)
    assert [(stage.bits, stage.group_size) for stage in codec.stages if isinstance(stage, KIVI)] == [
        (8, SIZE),
        (4, SIZE),
        (2, SIZE),
    ]
    assert all(isinstance(stage, Stage) for stage in codec.stages)
    assert (codec.traits.block, codec.traits.group_size, codec.traits.residual) == (SIZE, SIZE, 3)


@pytest.mark.parametrize(
    ("tokens", "exact", "coded"),
    [
        (0, 0, ()),
        (6, 6, ()),
        (7, 7, (4, 0, 0)),
        (8, 7, (8, 0, 0)),
        (11, 7, (8, 0, 0)),
        (12, 7, (8, 4, 0)),
        (19, 7, (8, 8, 0)),
        (20, 7, (8, 8, 4)),
        (100, 7, (8, 8, 84)),
    ],
)
def test_layout(tokens: int, exact: int, coded: tuple[int, ...]) -> None:
    assert made().layout(tokens) == (exact, coded)


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


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_every_stage_is_a_good_one(place: int, dim: int) -> None:
    stage = made().stages[place]
    stages.check_rows(stage, C, dim)
    stages.check_inactive(stage, C, dim)
    stages.check_ways_to_read(stage, C, dim, SIZE)
    stages.check_finite(stage, C, dim)


def test_head_dimension_must_fill_bytes() -> None:
    made().check(ModelInfo(1, 1, 12))
    with pytest.raises(ValueError, match=r"head dimension must be a multiple of 4 for Staircase, got 10"):
        made().check(ModelInfo(1, 1, 10))


@pytest.mark.parametrize(
    "parameters", [{"tokens_8bit": 0}, {"tokens_4bit": 0}, {"group_size": 0}, {"residual_length": -1}]
)
def test_it_refuses(parameters: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=rf"^Staircase\.{next(iter(parameters))} must be .*, got .*; try .*\.$"):
        Staircase(**parameters)


@pytest.mark.full  # tests/engine/test_compile.py compiles a whole step with this codec on every commit
@pytest.mark.filterwarnings("default")  # the compiler warns about itself
def test_it_compiles_whole() -> None:
    codec = made()

    def demote(keys: torch.Tensor, values: torch.Tensor, *where: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for stage in codec.stages:
            store = empty(stage, C, D)
            stage.write(store, keys, values, *where)
            keys, values = stages.read(stage, store, C)
            found += [keys, values, stage.score(store, keys[:, :, :2], None)]
        return found

    given = (*draw(C, D), at(range(C)), flags([True] * C), flags([False] * C))
    compiled = torch.compile(demote, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*given), demote(*given), strict=True):
        assert torch.equal(got, want)
