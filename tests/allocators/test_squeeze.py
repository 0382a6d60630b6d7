"""SqueezeAttention: the paper's numbers, degenerate cases, and recorded profiles."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from kvpolicy.allocators.profile import load_profile, save_profile
from kvpolicy.allocators.squeeze import SqueezeAttention
from kvpolicy.policy import Policy

COSINE = torch.tensor([[0.5, 0.52, 0.8, 0.82] + [0.95, 0.96, 0.97, 0.98] * 3])


def budgets(cosine: torch.Tensor, total: int, ceiling: int = 10**6, **parameters: float) -> list[int]:
    squeeze = SqueezeAttention(**parameters)  # pyright: ignore[reportArgumentType]
    layers = cosine.shape[1]
    return squeeze.budgets(cosine, torch.tensor([total]), 1, torch.tensor([ceiling]), layers)[0].tolist()


def test_most_similar_layers_keep_a_share_and_the_others_divide_the_rest() -> None:
    got = budgets(COSINE, 16 * 100)
    assert got == [(1600 - 12 * 40) // 4] * 4 + [40] * 12
    assert sum(got) == 1600


def test_numbers_of_the_authors_readme() -> None:
    """L=32, 20 layers in the top group, ini_size .21 and KV_class3 .08 of 8000 tokens: 3413 and 640."""
    cosine = torch.tensor([[0.5] * 5 + [0.7] * 7 + [0.95] * 20])
    cosine += torch.linspace(0, 1e-3, 32)
    got = budgets(cosine, int(32 * 0.21 * 8000), keep_share=0.08 / 0.21)
    assert set(got[12:]) == {640}
    assert {tokens - 3413 for tokens in got[:12]} <= {0, 1}


def test_surplus_is_not_lost() -> None:
    """The paper's formula gives the first layers more than the prompt holds; here the others get it."""
    got = budgets(COSINE, 16 * 100, ceiling=150)
    assert got == [150] * 4 + [84, 84, 84, 84] + [83] * 8
    assert sum(got) == 1600


def test_two_groups_as_in_the_abstract() -> None:
    got = budgets(torch.tensor([[0.2, 0.3, 0.9, 0.95]]), 400, groups=2)
    assert got == [160, 160, 40, 40]


def test_as_many_distinct_layers_as_groups_are_enough() -> None:
    assert budgets(torch.tensor([[0.5, 0.7, 0.9, 0.9]]), 400) == [160, 160, 40, 40]
    every = torch.tensor([[0.2, 0.9, 0.5, 0.7]])
    assert budgets(every, 400, groups=4) == [120, 40, 120, 120]
    assert budgets(every, 400, groups=5) == [100, 100, 100, 100]


@pytest.mark.parametrize(
    "cosine",
    [
        [0.9],
        [0.5, 0.9],
        [0.9] * 6,
        [0.5] * 3 + [0.9] * 3,
        [0.5, 0.5 + 5e-7, 0.9, 0.9 + 5e-7],
        [0.5, float("nan"), 0.9, 0.1],
    ],
)
def test_too_few_distinct_layers_share_evenly(cosine: list[float]) -> None:
    got = budgets(torch.tensor([cosine]), 100 * len(cosine))
    assert got == [100] * len(cosine)


def test_share_of_one_is_uniform() -> None:
    assert budgets(COSINE, 1600, keep_share=1.0) == [100] * 16


@pytest.mark.parametrize("parameters", [{"keep_share": 0.0}, {"keep_share": 1.1}, {"groups": 1}])
def test_it_refuses(parameters: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"^SqueezeAttention\.{next(iter(parameters))} must be .*, got .*; try .*\.$"):
        SqueezeAttention(**parameters)  # pyright: ignore[reportArgumentType]


def test_profile_replaces_measuring(tmp_path: Path) -> None:
    path = str(tmp_path / "profile.json")
    save_profile(path, "tiny", COSINE[0])
    policy = Policy.parse(f"squeeze:profile={path}")
    squeeze = policy.allocator
    assert squeeze.layer_metric == "" and SqueezeAttention().layer_metric == "cosine"
    got = squeeze.budgets(None, torch.tensor([1600, 800]), 1, torch.tensor([999, 999]), 16)
    assert got[0].tolist() == budgets(COSINE, 1600)
    assert got[1].tolist() == budgets(COSINE, 800)
    assert json.loads(Path(path).read_text())["layers"] == 16


def test_profile_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(path, "tiny", [0.5, 0.6])
    assert load_profile(path, 2) == (0.5, 0.6)
    save_profile(path, "tiny", [0.5, 0.75, 0.8])
    os.utime(path, ns=(1, 1))
    assert load_profile(path, 3) == (0.5, 0.75, 0.8)


def test_a_relative_path_is_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, cosine in (("a", 0.25), ("b", 0.75)):  # files of one size and one time
        path = tmp_path / name / "profile.json"
        path.parent.mkdir()
        save_profile(path, "tiny", [cosine])
        os.utime(path, ns=(0, 0))
        monkeypatch.chdir(path.parent)
        assert load_profile("profile.json", 1) == (cosine,)


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
