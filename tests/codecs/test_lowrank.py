"""LowRank: projections, and what every stage must keep to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import KIVI, KVPolicyError, LowRank, TokenWise, TurboQuant
from kvpolicy.codecs import projection
from kvpolicy.codecs._files import save
from kvpolicy.codecs.projection import Basis
from kvpolicy.protocols import ModelInfo
from tests.codecs import stages
from tests.codecs.stages import H, draw, fill, read

C = 12
D = 16


def calibration(folder: Path, heads: int = H, layers: int = 1, **meta: Any) -> str:
    """Bases of random keys and values, and of queries that lie mostly along a few channels."""
    generator = torch.Generator().manual_seed(heads)
    tensors: dict[str, Tensor] = {}
    for layer in range(layers):
        for part in ("keys.pre", "keys.post", "values", "queries"):
            basis = torch.linalg.qr(torch.randn(heads, D, D, generator=generator)).Q
            tensors[f"{part}.basis.{layer}"] = basis.half()
            tensors[f"{part}.energy.{layer}"] = torch.logspace(1, -2, D).expand(heads, -1)
            tensors[f"{part}.mean.{layer}"] = torch.randn(heads, D, generator=generator)
    save(folder, "lowrank", {"model": None, "head_dim": D, **meta}, tensors)
    return str(folder)


@pytest.fixture
def made(tmp_path: Path) -> Any:
    folder = calibration(tmp_path / "bases")

    def make(**options: Any) -> LowRank:
        every: dict[str, Any] = {"rank": 5, "value_rank": 3, "calibration": folder} | options
        return LowRank(**every)

    return make


BASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tokenwise": {"base": TokenWise(bits=8)},
    "kivi": {"base": KIVI(bits=8, group_size=4)},
}


@pytest.mark.parametrize("basis", ["keys", "scores"])
def test_all_directions_lose_nothing_but_the_rounding(made: Any, basis: str) -> None:
    codec = made(rank=D, value_rank=D, basis=basis)
    store, keys, values = fill(codec, C, D)
    decoded_keys, decoded_values = read(codec, store, C)
    assert float((decoded_keys - keys).abs().max() / keys.abs().max()) < 3e-3
    assert float((decoded_values - values).abs().max() / values.abs().max()) < 1e-3


def test_a_basis_for_scores_has_the_least_error_of_products(made: Any, tmp_path: Path) -> None:
    """Keys and queries with the calibrated moments: the error is that of the eigenvalues left out, and the least."""
    tensors = projection._files.load(calibration(tmp_path / "one", heads=1), "lowrank").tensors
    keys, queries = (
        (projection.orthonormal(tensors[f"{part}.basis.0"]), tensors[f"{part}.energy.0"].double())
        for part in ("keys.post", "queries")
    )
    covariance, moment = ((basis * energy[:, None]) @ basis.mT for basis, energy in (keys, queries))
    errors: dict[str, float] = {}
    for name in ("keys", "scores"):
        given = projection.of_keys(Basis(str(tmp_path / "one"), kind=name), 4, 0, "cpu")
        lost = torch.eye(D).double() - (given.encode[0] @ given.decode[0]).double()
        errors[name] = float(torch.einsum("hij,hjk->hik", moment, lost.mT @ covariance @ lost).diagonal(0, 1, 2).sum())
    values, vectors = torch.linalg.eigh(moment)
    root = (vectors * values.sqrt()[:, None]) @ vectors.mT
    least = float(torch.linalg.eigvalsh(root @ covariance @ root)[0, : D - 4].sum())
    assert errors["scores"] == pytest.approx(least, rel=1e-4)
    assert errors["scores"] < 0.9 * errors["keys"]


@pytest.mark.parametrize("base", BASES)
def test_what_every_stage_must_keep_to(made: Any, base: str) -> None:
    size = 4 if base == "kivi" else 1
    codec = made(rank=8, value_rank=4, **BASES[base])
    stages.check_rows(codec, C, D)
    stages.check_inactive(codec, C, D)
    stages.check_ways_to_read(codec, C, D, size)
    stages.check_finite(codec, C, D)


def test_slots_are_free_of_each_other(made: Any) -> None:
    stages.check_overwrite(made(), C, D, ())


def test_unequal_ranks_take_no_bytes_for_the_other_side(made: Any) -> None:
    codes = made(rank=7, value_rank=2).alloc(1, 1, 10, D, "cpu")
    assert codes.keys.keys.shape == (1, 1, 10, 7) and codes.values.values.shape == (1, 1, 10, 2)
    assert codes.keys.values.numel() == codes.values.keys.numel() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be"),
        ({"basis": "scores", "key_space": "unrotated"}, "basis must be 'keys' with key_space='unrotated'"),
        ({"base": TokenWise(), "block_size": 3}, "must be auto over TokenWise"),
        ({"calibration": ""}, "calibration must be a folder"),
    ],
)
def test_parameters(options: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        LowRank(**options)


@pytest.mark.parametrize(
    ("options", "info", "message"),
    [
        ({"rank": 17}, ModelInfo(1, H, D), "LowRank.rank must be at most the head dimension, 16, got 17"),
        ({"value_rank": 17}, ModelInfo(1, H, D), "LowRank.value_rank must be at most"),
        ({}, ModelInfo(1, H, 32), "for a head dimension of 32, got 16"),
        ({}, ModelInfo(1, H + 1, D), "must be for 4 KV heads of dimension 16, as the model has, got 3"),
        ({}, ModelInfo(2, H, D), "must contain values.mean for layer 1|must contain keys.post.mean for layer 1"),
        (
            {"base": TurboQuant(bits=4)},
            ModelInfo(1, H, D),
            "must be a multiple of 2 for TurboQuant.bits=4, got 5|got 3",
        ),
    ],
)
def test_models(made: Any, options: dict[str, Any], info: ModelInfo, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        made(**options).check(info)
    made().check(ModelInfo(1, H, D))


def test_one_basis_may_serve_all_heads(tmp_path: Path) -> None:
    codec = LowRank(rank=4, calibration=calibration(tmp_path / "shared", heads=1))
    codec.check(ModelInfo(1, 6, D))
    assert codec.load_calibration(0, "cpu", slice(3, 6)).key_encode.shape == (1, 1, D, 4)
    codec = LowRank(rank=4, calibration=calibration(tmp_path / "own", heads=6))
    one = codec.load_calibration(0, "cpu", slice(3, 6))
    all_ = codec.load_calibration(0, "cpu")
    assert torch.equal(one.key_encode, all_.key_encode[:, 3:])
    keys, values = draw(2, D)
    assert keys.shape == values.shape
