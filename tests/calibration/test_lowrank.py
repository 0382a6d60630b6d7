"""Bases of a model's keys and values: moments of all tokens, directions of most variance, and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvpolicy import KVPolicyError
from kvpolicy.calibration import calibrate_lowrank, collect
from kvpolicy.calibration.lowrank import Moments, basis_of, collect_moments
from kvpolicy.codecs._files import load
from tests.calibration.test_heads import llama, windows


def test_moments_are_those_of_all_tokens() -> None:
    model, texts = llama(), windows(2, 40)
    found = collect_moments(model, texts)
    samples = collect(model, texts, tokens=10**6)
    parts = {"keys.post": samples.rotated, "keys.pre": samples.unrotated, "values": samples.values}
    for part, layers in parts.items():
        for layer, x in layers.items():
            own, x = found[layer][part], x.double()
            torch.testing.assert_close(own.mean, x.mean(1), atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(own.product, x.mT @ x / x.shape[1], atol=1e-6, rtol=1e-5)


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
    model, texts = llama(), windows(2, 80)
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


def test_a_short_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KVPolicyError, match="at least 128, got 40"):
        calibrate_lowrank(llama(), windows(1, 40), tmp_path)
