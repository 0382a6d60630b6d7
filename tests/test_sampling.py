"""The sampler of products: every pair is there, nothing is left to chance, and the rest is behind `full`."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.sampling import Row, cases, each_once, pairwise, product, star, wants_full

COLORS = ["red", "green", "blue"]
SIZES = [1, 2, 3, 4]
SHAPES = [[0], [0, 1]]
DEFAULT = "not full and not heavy and not slow and not gpu and not network and not vllm"


def pairs_of(rows: Sequence[Row]) -> set[tuple[Any, ...]]:
    """Every pair of values that meet in a row, with the places of their axes."""
    return {(i, repr(row[i]), j, repr(row[j])) for row in rows for i, j in itertools.combinations(range(len(row)), 2)}


def repr_of(row: Sequence[Any]) -> tuple[str, ...]:
    return tuple(map(repr, row))


@pytest.mark.parametrize("seed", range(8))
def test_every_pair_of_any_two_axes_is_in_the_sample(seed: int) -> None:
    dice = Random(seed)
    axes = [range(100 * axis, 100 * axis + dice.randint(1, 9)) for axis in range(dice.randint(2, 7))]
    rows = pairwise(*axes, seed=seed)
    assert pairs_of(rows) == pairs_of([*itertools.product(*axes)])
    assert all({row[place] for row in rows} == set(axis) for place, axis in enumerate(axes))
    assert len(set(rows)) == len(rows)
    first, second = sorted(map(len, axes))[-2:]
    assert len(rows) <= 1.5 * first * second + 10


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_are_not_allowed_are_left_out_and_no_pair_that_is(seed: int) -> None:
    dice = Random(seed)
    axes = [range(dice.randint(2, 6)) for _ in range(4)]
    wrong = {row for row in itertools.product(*axes) if row[0] == row[1] or dice.random() < 0.5}
    rows = pairwise(*axes, allowed=lambda row: row not in wrong)
    assert not wrong & {*rows}
    assert pairs_of(rows) == pairs_of([row for row in itertools.product(*axes) if row not in wrong])


@pytest.mark.parametrize("seed", range(4))
def test_axes_that_are_apart_need_not_meet_and_all_others_do(seed: int) -> None:
    axes = [range(100 * axis, 100 * axis + size) for axis, size in enumerate([3, 11, 12, 2])]
    rows = pairwise(*axes, seed=seed, apart=[(1, 2)])
    wanted = {pair for pair in pairs_of([*itertools.product(*axes)]) if (pair[0], pair[2]) != (1, 2)}
    assert wanted <= pairs_of(rows)
    assert len(rows) < 60, "the product of the two axes has 132 rows"


def test_each_value_once() -> None:
    rows = each_once(COLORS, SIZES, SHAPES)
    assert len(rows) == 4
    assert [[row[axis] for row in rows] for axis in range(3)] == [[*COLORS, "red"], SIZES, [*SHAPES, *SHAPES]]


@pytest.mark.parametrize("axes", [([],), (SIZES, []), (SIZES, ["a", "b", "a"])])
def test_an_axis_has_values_and_each_of_them_once(axes: tuple[list[Any], ...]) -> None:
    with pytest.raises(ValueError, match="each of them once"):
        pairwise(*axes)


def test_the_sample_depends_on_the_axes_and_the_seed_alone() -> None:
    """Not on the hashes of strings, which differ between processes."""
    code = "from tests.sampling import pairwise; print(pairwise('abcdefg', ['x', 'yy', 'zzz'], range(5), 'pq'))"
    root = str(Path(__file__).parent.parent)
    printed: set[str] = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": root}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        printed.add(done.stdout.strip())
    axes = ("abcdefg", ["x", "yy", "zzz"], range(5), "pq")
    assert printed == {str(pairwise(*axes))}
    assert pairwise(*axes, seed=1) != pairwise(*axes)


def test_a_star_varies_one_axis_at_a_time() -> None:
    rows = star(COLORS, SIZES, centers=[("", 1), ("red", 0)])
    assert rows == [*((color, 1) for color in COLORS), *(("red", size) for size in SIZES[1:])]


def made(mark: pytest.MarkDecorator, expression: str) -> tuple[list[Row], list[Row]]:
    """The cases of a test that are in its sample, and those with the marker `full`."""
    found = [*cases(mark.args[0], expression)]
    full = [[mark.name for mark in case.marks] == ["full"] for case in found]
    assert all(not case.marks or case.marks[0].name in ("full", "heavy") for case in found)
    return (
        [case.values for case, rest in zip(found, full, strict=True) if not rest],
        [case.values for case, rest in zip(found, full, strict=True) if rest],
    )


@pytest.mark.parametrize("sample", [None, [("red", 2, [0]), ("blue", 4, [0, 1])]])
def test_no_case_of_a_product_is_lost(sample: list[Row] | None) -> None:
    mark = product("color,size,shape", COLORS, SIZES, SHAPES, sample=sample)
    sample_rows, rest = made(mark, "full")
    assert sample_rows == (pairwise(COLORS, SIZES, SHAPES) if sample is None else sample)
    assert sorted([*sample_rows, *rest]) == sorted(itertools.product(COLORS, SIZES, SHAPES))
    assert made(mark, DEFAULT) == (sample_rows, [])


def test_a_product_may_be_left_out_as_a_whole() -> None:
    mark = product("size", SIZES, sample=[])
    assert made(mark, DEFAULT) == ([], [(1,)])  # which the default expression deselects
    assert made(mark, "full") == ([], [(1,), (2,), (3,), (4,)])


@pytest.mark.parametrize("row", [("red", 5), ("blue", 4)])
def test_a_sample_is_of_the_product(row: Row) -> None:
    with pytest.raises(ValueError, match="rows of the product"):
        product("color,size", COLORS, SIZES, sample=[row], allowed=lambda row: row != ("blue", 4))


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [(DEFAULT, False), ("not full", False), ("slow", False), ("full", True), ("slow or full", True), ("", True)],
)
def test_the_rest_is_made_where_it_may_be_asked_for(expression: str, wanted: bool) -> None:
    assert wants_full(expression) is wanted


def test_the_default_leaves_it_out(pytestconfig: pytest.Config) -> None:
    options = pytestconfig.getini("addopts")
    assert options[options.index("-m") + 1] == DEFAULT


SOME = [("red", 1), ("green", 3)]


@product("color,size", COLORS, SIZES, sample=SOME)
def test_the_hook_makes_the_cases(color: str, size: int, request: pytest.FixtureRequest) -> None:
    full = request.node.get_closest_marker("full") is not None
    assert full is ((color, size) not in SOME)


def test_pairs_of_known_values_are_left_to_the_slow_job() -> None:
    (some,) = product("color,size,shape", COLORS, SIZES, SHAPES).args
    params = [*cases(some, DEFAULT)]
    light = [param.values for param in params if not param.marks]
    assert all({row[axis] for row in map(repr_of, light)} == {*map(repr, some.axes[axis])} for axis in range(3))
    assert 4 <= len(light) < len(params) == len(some.sample)
    assert all(mark.name == "heavy" for param in params for mark in param.marks)


def test_drawn_axes_do_not_multiply_the_rest() -> None:
    mark = product("color,size,shape", COLORS, SIZES, SHAPES, sample=[("red", 1, [0])], drawn=(1,))
    rows = [*mark.args[0].rest()]
    assert len(rows) in (5, 6), "one for each color and shape, but for one that the sample may have"
    assert {(color, repr(shape)) for color, _, shape in rows} >= {(c, repr(s)) for c in COLORS for s in SHAPES} - {
        ("red", "[0]")
    }
    assert rows == [*mark.args[0].rest()]
