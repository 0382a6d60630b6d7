"""Uniform, Pyramid and SqueezeAttention against their slow versions, and what holds for every allocator."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy import registry
from kvpolicy.allocators.profile import load_profile, save_profile
from kvpolicy.allocators.squeeze import SqueezeAttention, top_group
from kvpolicy.policy import Policy
from tests.reference import allocators
from tests.reference.allocators.squeeze import squeeze

ALL = [registry.lookup(name)[1] for name in registry.names("allocator")]
COSINES = [
    [0.5, 0.52, 0.8, 0.82] + [0.95, 0.96, 0.97, 0.98] * 3,
    [0.5] * 5 + [0.7] * 7 + [0.95] * 20,
    [0.2, 0.3, 0.9, 0.95],
    # As many distinct layers as groups, and fewer.
    [0.5, 0.7, 0.9, 0.9],
    [0.2, 0.9, 0.5, 0.7],
    [0.9],
    [0.5, 0.9],
    [0.9] * 6,
    [0.5] * 3 + [0.9] * 3,
    [0.5, 0.5 + 5e-7, 0.9, 0.9 + 5e-7],
]
SPECS = [
    "uniform",
    "pyramid",
    "pyramid:beta=1",
    "pyramid:beta=5",
    "squeeze",
    "squeeze:keep_share=0.38",
    "squeeze:keep_share=1.0",
]


@pytest.mark.parametrize("spec", SPECS)
def test_as_the_slow_version(spec: str) -> None:
    allocator: Any = Policy.parse(f"{spec}+snapkv").allocator
    dice = random.Random(spec)
    for cosines in [*COSINES, *([dice.random() for _ in range(dice.randint(1, 16))] for _ in range(8))]:
        metrics = torch.tensor([cosines])
        layers = len(cosines)
        for each, floor, ceiling in ((100, 1, 10**6), (100, 8, 120), (53, 8, 100), (8, 8, 100), (100, 1, 100)):
            total = each * layers + dice.randrange(layers) * (each < ceiling - 1)
            got = allocator.budgets(metrics, torch.tensor([total]), floor, torch.tensor([ceiling]), layers)
            given = metrics[0].tolist(), total, layers, floor, ceiling
            want = allocators.budgets(spec.partition(":")[0], dataclasses.asdict(allocator), *given)
            assert got[0].tolist() == want, given


@pytest.mark.parametrize("groups", [2, 4, 5])
def test_other_numbers_of_groups(groups: int) -> None:
    for cosines in filter(lambda each: len(each) < 9, COSINES):
        metrics = torch.tensor([cosines])
        total = 100 * len(cosines)
        allocator = SqueezeAttention(groups=groups)
        got = allocator.budgets(metrics, torch.tensor([total]), 1, torch.tensor([total]), len(cosines))
        assert got[0].tolist() == squeeze(metrics[0].tolist(), total, 1, total, groups=groups), cosines


def test_a_cosine_that_is_no_number_shares_evenly() -> None:
    cosines = torch.tensor([[0.5, float("nan"), 0.9, 0.1]])
    got = SqueezeAttention().budgets(cosines, torch.tensor([400]), 1, torch.tensor([1000]), 4)
    assert got.tolist() == [[100] * 4]


@pytest.mark.parametrize("cls", ALL)
def test_sum_bounds_and_type(cls: Any) -> None:
    for layers in (1, 2, 3, 32):
        total = torch.tensor([layers * 50, layers * 33 + 1, layers * 5])
        metrics = torch.rand(3, layers, generator=torch.Generator().manual_seed(0))
        got = cls().budgets(metrics, total, 5, torch.full((3,), 60), layers)
        assert got.dtype == torch.int64 and got.shape == (3, layers)
        assert torch.equal(got.sum(-1), total)
        assert got.min() >= 5 and got.max() <= 60
    most = torch.tensor([100])
    assert cls().budgets(torch.rand(1, 8), most * 8, 1, most, 8).tolist() == [[100] * 8], "all that there is"


@pytest.mark.parametrize("cls", ALL)
def test_a_batch_is_its_rows(cls: Any) -> None:
    cosine = torch.rand(4, 12, generator=torch.Generator().manual_seed(1))
    total = torch.tensor([300, 77, 1200, 500])
    ceiling = torch.tensor([100, 50, 90, 45])
    together = cls().budgets(cosine, total, 4, ceiling, 12)
    for row in range(4):
        one = slice(row, row + 1)
        alone = cls().budgets(cosine[one], total[one], 4, ceiling[one], 12)
        assert torch.equal(together[one], alone)


def enumerate_top(values: list[float], groups: int) -> tuple[int, float]:
    """Size of the top group, and the cost, over every contiguous division."""
    ranked = sorted(values)
    best = (float("inf"), 0)
    for cuts in itertools.combinations(range(1, len(ranked)), groups - 1):
        parts = [ranked[i:j] for i, j in itertools.pairwise([0, *cuts, len(ranked)])]
        cost = sum(float(((np.array(part) - np.mean(part)) ** 2).sum()) for part in parts)
        if cost < best[0] - 1e-12 or (cost < best[0] + 1e-12 and len(parts[-1]) > best[1]):
            best = (cost, len(parts[-1]))
    return best[1], best[0]


@given(st.lists(st.integers(0, 1000), min_size=4, max_size=9), st.integers(2, 4))
@settings(deadline=None)
def test_it_is_the_optimum(whole: list[int], groups: int) -> None:
    values = [number / 1000 for number in whole]
    got = top_group(torch.tensor(values, dtype=torch.float64), groups)
    size, _ = enumerate_top(values, groups)
    assert int(got.sum()) == size
    assert not bool(got.all())
    chosen = torch.tensor(values)[got]
    others = torch.tensor(values)[~got]
    assert chosen.min() >= others.max()


def test_of_equally_good_divisions_the_largest_top_group_wins() -> None:
    assert top_group(torch.tensor([0.0, 1.0, 2.0, 3.0]), 3).tolist() == [False, False, True, True]
    assert top_group(torch.tensor([0.0, 0.5, 0.5, 1.0]), 2).tolist() == [False, True, True, True]
    assert top_group(torch.full((4,), 0.003, dtype=torch.float64), 2).tolist() == [False, True, True, True]


@pytest.mark.parametrize("count", [2, 3, 7])
def test_as_many_groups_as_values(count: int) -> None:
    """Each is a group of its own; of equal ones, all but the least that other groups need are in the top group."""
    values = torch.arange(count).roll(2) / 8
    assert top_group(values, count).tolist() == (values == values.max()).tolist()
    assert int(top_group(torch.ones(count), count).sum()) == 1


def test_close_values_do_not_cancel() -> None:
    values = torch.tensor([0.9, 0.9 + 3e-6, 0.9 + 6e-6, 0.9 + 7e-6, 5.0], dtype=torch.float64)
    assert top_group(values[:4], 3).tolist() == [False, False, True, True]


def test_equal_values_stay_together() -> None:
    """Also where a start between them costs less than the tolerance, and one before them costs more."""
    values = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0 + 3.5e-5], dtype=torch.float64)
    assert top_group(values, 3).tolist() == [False, True, True, True, True, True]


def test_profile_replaces_measuring(tmp_path: Path) -> None:
    path = str(tmp_path / "profile.json")
    save_profile(path, "tiny", COSINES[0])
    squeeze = Policy.parse(f"squeeze:profile={path}").allocator
    assert squeeze.layer_metric == "" and SqueezeAttention().layer_metric == "cosine"
    got = squeeze.budgets(None, torch.tensor([1600, 800]), 1, torch.tensor([999, 999]), 16)
    measured = torch.tensor([COSINES[0]] * 2)
    want = SqueezeAttention().budgets(measured, torch.tensor([1600, 800]), 1, torch.tensor([999, 999]), 16)
    assert torch.equal(got, want)
    assert json.loads(Path(path).read_text())["layers"] == 16


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "must be a readable file, got No such file"),
        ("{", "must be JSON, got one that cannot be parsed"),
        (b"\xff\xfe", "must be JSON, got one that cannot be parsed"),
        ("[1]", "must have a list of finite numbers called cosine, got NoneType"),
        ('{"cosine": ["a"], "version": 1}', "must have a list of finite numbers called cosine, got list"),
        ('{"cosine": [NaN, 1], "version": 1}', "must have a list of finite numbers called cosine, got list"),
        ('{"cosine": [0.1, 0.2]}', "must have an integer as its format, got None"),
        ('{"cosine": [0.1, 0.2], "version": 2}', "update kvpolicy"),
        ('{"cosine": [0.1, 0.2], "format": 2, "kvpolicy": "9"}', "written by kvpolicy 9"),
        ('{"cosine": [0.1, 0.2, 0.3], "version": 1}', "must be of a model with 2 layers, got 3"),
    ],
)
def test_bad_profile_is_told(tmp_path: Path, content: str | bytes | None, message: str) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        load_profile(path, 2)
