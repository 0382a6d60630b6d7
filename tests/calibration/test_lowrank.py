"""Bases of a model's keys and values: moments of all tokens, directions of most variance, and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvpolicy import KVPolicyError, LowRank
from kvpolicy.calibration import calibrate_lowrank, collect
from kvpolicy.calibration.lowrank import Moments, basis_of, collect_moments
from kvpolicy.calibration.samples import fisher_information
from kvpolicy.codecs._files import load
from kvpolicy.hf.identity import model_info
from tests.calibration.test_heads import llama, windows


def test_moments_are_those_of_all_tokens() -> None:
    model = llama()
    texts = windows(2, 40)
    found = collect_moments(model, texts)
    samples = collect(model, texts, tokens=10**6)
    parts = {"keys.post": samples.rotated, "keys.pre": samples.unrotated, "values": samples.values}
    for part, layers in parts.items():
        for layer, x in layers.items():
            own = found[layer][part]
            x = x.double()
            torch.testing.assert_close(own.mean, x.mean(1), atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(own.product, x.mT @ x / x.shape[1], atol=1e-6, rtol=1e-5)


def test_moments_of_groups_are_those_of_heads_as_one_vector() -> None:
    model = llama()
    texts = windows(2, 40)
    found = collect_moments(model, texts, groups=[2])
    samples = collect(model, texts, tokens=10**6)
    parts = {"keys.post": samples.rotated, "keys.pre": samples.unrotated, "values": samples.values}
    for part, layers in parts.items():
        for layer, x in layers.items():
            own = found[layer][f"{part}.joint2"]
            long = torch.cat([*x.double()], -1)  # two heads
            torch.testing.assert_close(own.mean[0], long.mean(0), atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(own.product[0], long.mT @ long / len(long), atol=1e-6, rtol=1e-5)


def test_fisher_information_is_that_of_all_tokens() -> None:
    """Windows of different lengths, whose loss is a mean, weigh as much as their tokens."""
    model = llama(initializer_range=0.5)
    texts = [windows(1, 40)[0], windows(1, 10)[0]]
    found = fisher_information(model, texts)
    every = [collect(model, [ids], tokens=10**6, key_spaces=("rotated",), fisher=True).fisher for ids in texts]
    for layer, both in found.items():
        squares = [own[layer].double() * len(ids) ** 2 for own, ids in zip(every, texts, strict=True)]
        want = torch.cat(squares, 2).mean((1, 2, 3))
        torch.testing.assert_close(torch.tensor(both, dtype=torch.float64), want, rtol=1e-5, atol=0)


def test_directions_are_those_of_most_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 500, 6, generator=generator).double() * torch.tensor([3.0, 0.1, 1.0, 0.0, 2.0, 0.5]) + 7
    found = basis_of(Moments(x.mean(1), x.mT @ x / 500))
    centered = x - x.mean(1, keepdim=True)
    assert (found["energy"].diff() <= 0).all() and (found["energy"] >= 0).all()
    along = (centered @ found["basis"].double()).square().mean(1)
    torch.testing.assert_close(along, found["energy"].double(), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(found["mean"].double(), x.mean(1), atol=1e-5, rtol=0)


def test_files(tmp_path: Path) -> None:
    model = llama()
    texts = windows(2, 80)
    meta = calibrate_lowrank(model, texts, tmp_path)
    assert meta["tokens"] == 160 and sorted(meta["energy"]) == ["keys.post", "keys.pre", "values"]
    assert all(0.2 < share <= 1 for share in meta["energy"].values())
    written = load(str(tmp_path), "lowrank")
    assert {name.rpartition(".")[0] for name in written.tensors} == {
        *(f"{part}.{what}" for part in ("keys.pre", "keys.post", "values") for what in ("mean", "basis", "energy")),
        "queries.basis",
        "queries.energy",
    }
    calibrate_lowrank(model, texts, tmp_path)  # the same again
    with pytest.raises(KVPolicyError, match="force"):
        calibrate_lowrank(model, texts[:1] * 3, tmp_path)
    calibrate_lowrank(model, texts, tmp_path, key_spaces=["unrotated"], force=True)
    names = {name.rpartition(".")[0] for name in load(str(tmp_path), "lowrank").tensors}
    assert names == {f"{part}.{what}" for part in ("keys.pre", "values") for what in ("mean", "basis", "energy")}


def test_files_with_groups_and_information(tmp_path: Path) -> None:
    model = llama()
    texts = windows(2, 80)
    meta = calibrate_lowrank(model, texts, tmp_path, key_spaces=["rotated"], head_groups=[2], fisher=True)
    assert meta["head_groups"] == [2] and meta["fisher"] and sorted(meta["energy"]) == ["keys.post", "values"]
    found = load(str(tmp_path), "lowrank").tensors
    heads, dim = found["values.mean.0"].shape
    assert found["values.joint2.basis.0"].shape == (heads // 2, 2 * dim, 2 * dim)
    assert torch.equal(found["keys.post.joint2.mean.1"].flatten(), found["keys.post.mean.1"].flatten())
    want = {layer: torch.tensor(both) for layer, both in fisher_information(model, texts).items()}
    assert all(torch.equal(found[f"fisher.{layer}"], both) for layer, both in want.items())
    codec = LowRank(rank=2, ranks="fisher", head_group=2, calibration=str(tmp_path))
    codec.check(model_info(model))
    with pytest.raises(KVPolicyError, match=r"differs in head_groups, fisher; try"):
        calibrate_lowrank(model, texts, tmp_path, key_spaces=["rotated"])


@pytest.mark.parametrize("group", [1, 3, 4])
def test_groups_divide_the_heads(tmp_path: Path, group: int) -> None:
    with pytest.raises(KVPolicyError, match=f"must be at least 2 and divide the 2 KV heads of the model, got {group}"):
        calibrate_lowrank(llama(), windows(2, 80), tmp_path, head_groups=[group])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_spaces": ["both"]}, "must be of rotated and unrotated, got both"),
        ({"key_spaces": []}, "got none"),
    ],
)
def test_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        calibrate_lowrank(llama(), windows(2, 80), tmp_path, **options)
