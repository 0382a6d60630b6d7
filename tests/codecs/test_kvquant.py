"""KVQuant and its calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.calibration import kvquant as calibration
from kvpolicy.calibration.kvquant import fit_kvquant
from kvpolicy.codecs._files import save
from kvpolicy.codecs.kvquant import KVQuant, nearest
from kvpolicy.protocols import ModelInfo, StageStore
from tests.codecs import stages
from tests.codecs.stages import B, H, at, draw, empty, flags

C = 24
D = 20
BITS = [2, 3, 4]


def made(folder: Path, bits: Any = 3, dim: int = D, **fields: Any) -> KVQuant:
    return KVQuant(bits=bits, calibration=stages.kvquant_files(folder, dim), **fields)


def half(x: float) -> float:
    return float(torch.tensor(x).half())


@pytest.mark.parametrize("heads", [slice(0, 1), slice(1, 3)])
def test_a_shard_encodes_its_heads_as_the_whole_model_does(heads: slice, tmp_path: Path) -> None:
    codec = made(tmp_path)
    store, keys, values = stages.fill(codec, C, D)
    codes = codec.alloc(B, heads.stop - heads.start, C, D, "cpu")
    shard = StageStore(codes, codec.load_calibration(0, "cpu", heads))
    everything = at(range(C))[:, heads], flags([True] * C)[:, heads], flags([False] * C)[:, heads]
    codec.write(shard, keys[:, heads], values[:, heads], *everything)
    for got, want in zip(stages.read(codec, shard, C), stages.read(codec, store, C), strict=True):
        assert torch.equal(got, want[:, heads])


def test_a_channel_without_a_range(tmp_path: Path) -> None:
    """A key that is at its offset there is decoded to that, and is no outlier."""
    fitted = fit_kvquant(*(x.transpose(0, 1).flatten(1, 2) for x in draw(64, D, seed=0)))
    fitted["keys.range"][..., 2] = 0
    save(tmp_path, "kvquant", {"model": None, "head_dim": D}, {f"{name}.0": t.clone() for name, t in fitted.items()})
    codec = KVQuant(calibration=str(tmp_path))
    store = empty(codec, C, D)
    keys, values = draw(C, D)
    keys[..., 2] = codec.load_calibration(0, "cpu").key_offset[..., 2]
    keys[..., 5] = 1000.0
    codec.write(store, keys, values, at(range(C)), flags([True] * C), flags([False] * C))
    found = codec.keys(store, slice(0, C))
    assert torch.allclose(found[..., 2], keys[..., 2]) and torch.equal(found[..., 5], keys[..., 5])


def test_one_book_for_all_heads(tmp_path: Path) -> None:
    fitted = fit_kvquant(*(x[:1, 0] for x in draw(64, D)), bits=(3,))
    save(tmp_path, "kvquant", {"model": None, "head_dim": D}, {f"{name}.0": t for name, t in fitted.items()})
    codec = KVQuant(calibration=str(tmp_path))
    codec.check(ModelInfo(1, 7, D))
    stages.check_ways_to_read(codec, C, D)


def test_levels_are_read_by_their_norm(tmp_path: Path) -> None:
    plain = made(tmp_path, 2, norm=False).load_calibration(0, "cpu")
    normed = made(tmp_path, 2).load_calibration(0, "cpu")
    assert torch.equal(plain.key_levels, plain.key_decoded) and torch.equal(plain.key_levels, normed.key_levels)
    keys, values = draw(64, D, seed=0)
    inner = (keys - plain.key_offset) / plain.key_range
    inner = inner[inner.abs() <= 1]
    code = nearest(inner, normed.key_levels).long()
    torch.testing.assert_close(normed.key_decoded[code].mean(), inner.mean(), atol=1e-4, rtol=0)
    torch.testing.assert_close(normed.key_decoded[code].std(), inner.std(), atol=1e-4, rtol=0)
    assert plain.key_decoded[code].std() < 0.99 * inner.std()
    assert values.isfinite().all()


def test_percentiles_between_two_numbers_are_interpolated() -> None:
    keys = torch.randn(2, 21, 3, generator=torch.Generator().manual_seed(0))
    fitted = fit_kvquant(keys, keys, bits=(2,), outliers=0.03)
    low, high = (keys.quantile(fraction, dim=1) for fraction in (0.015, 0.985))
    torch.testing.assert_close(fitted["keys.offset"] - fitted["keys.range"], low)
    torch.testing.assert_close(fitted["keys.offset"] + fitted["keys.range"], high)


def test_levels_of_values_leave_out_outliers() -> None:
    values = torch.tensor([50.0, -1.0, -0.5, 0.5, 1.0]).expand(2, 30, -1)
    fitted = fit_kvquant(torch.randn(2, 30, 5), values, bits=(1,), outliers=0.2)
    assert fitted["values.levels.b1"].tolist() == [-0.75, 0.75]


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_where_numbers_are(bits: int) -> None:
    centers = torch.linspace(-1, 1, 2**bits) ** 3
    keys = centers[torch.arange(2000) % 2**bits][None, :, None] + torch.randn(1, 2000, 2) * 1e-3
    fitted = fit_kvquant(keys, keys, bits=(bits,))
    read_ = fitted[f"keys.levels.b{bits}"] * fitted["keys.range"].mean() + fitted["keys.offset"].mean()
    torch.testing.assert_close(read_, centers, atol=5e-3, rtol=0)
    assert torch.equal(fitted[f"keys.levels.b{bits}"], fit_kvquant(keys, keys)[f"keys.levels.b{bits}"])


def test_weights_draw_levels() -> None:
    keys = torch.rand(1, 1000, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    heavy = torch.where(keys > 0, 100.0, 1.0)
    plain, weighted = (fit_kvquant(keys, keys, weights=w) for w in (None, torch.stack([heavy, heavy])))
    for side in ("keys", "values"):
        few, more = ((some[f"{side}.levels.b4"] > 0).sum() for some in (plain, weighted))
        assert more > few
    none = fit_kvquant(keys, keys, weights=torch.zeros(2, 1, 1000, 8))
    assert torch.equal(none["keys.levels.b3"], plain["keys.levels.b3"])


def test_many_numbers_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "SAMPLE", 500)
    x = draw(200, D)[1][0]
    one = fit_kvquant(x, x, bits=(2,))
    other = fit_kvquant(x, x, bits=(2,))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("x", [torch.zeros(2, 9, 8), torch.full((2, 9, 8), 3.3), torch.randn(2, 1, 8)])
def test_few_different_numbers(x: Tensor) -> None:
    fitted = fit_kvquant(x, x)
    assert all(t.isfinite().all() for t in fitted.values())
    for side in ("keys", "values"):
        for bits in BITS:
            levels = fitted[f"{side}.levels.b{bits}"]
            assert levels.shape == (2**bits,) and torch.equal(levels, levels.sort().values)


def test_the_calibration_must_fit(tmp_path: Path) -> None:
    codec = KVQuant(calibration=stages.kvquant_files(tmp_path / "any", D, layers=2))
    codec.check(ModelInfo(2, H, D))
    with pytest.raises(ValueError, match=r"must contain keys\.offset for layer 2, got none"):
        codec.check(ModelInfo(3, H, D))
    with pytest.raises(
        ValueError, match=f"must be for 5 KV heads of dimension {D}, as the model has, got {H} of dimension {D}"
    ):
        codec.check(ModelInfo(2, 5, D))
    with pytest.raises(ValueError, match="must be for a head dimension of 8, got 20"):
        codec.check(ModelInfo(2, H, 8))
    with pytest.raises(ValueError, match="calibration must be a folder or tiny or tiny-4k, got"):
        KVQuant(calibration=str(tmp_path / "none")).check(ModelInfo(1, H, D))
    keys, values = (x[0] for x in draw(9, D))
    tensors = {f"{name}.0": t for name, t in fit_kvquant(keys, values, bits=(2,)).items()}
    save(tmp_path / "narrow", "kvquant", {"model": None, "head_dim": D}, tensors)
    with pytest.raises(ValueError, match=r"must contain keys\.levels\.b4 for layer 0, got none; .*with 4 bits"):
        KVQuant(bits=4, calibration=str(tmp_path / "narrow")).check(ModelInfo(1, H, D))
