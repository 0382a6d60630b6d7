"""KVQuant against its formula and its calibration, and what every stage must keep to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.calibration import kvquant as calibration
from kvpolicy.calibration.kvquant import fit_kvquant
from kvpolicy.codecs._files import save
from kvpolicy.codecs.kvquant import KVQuant, KVQuantCalibration, nearest
from kvpolicy.protocols import ALL_HEADS, At, Codec, ModelInfo, RotaryView, Stage, StageStore
from tests.codecs import stages
from tests.codecs.stages import B, H, at, draw, empty, error, flags, read

C = 24
D = 20
BITS = [2, 3, 4]


@dataclass(frozen=True)
class Opened:
    """A stage whose store has the calibration, so that what every stage must keep to can be asked of it."""

    codec: KVQuant
    calibration: KVQuantCalibration

    def load_calibration(
        self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS
    ) -> KVQuantCalibration:
        return self.calibration

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> Any:
        return self.codec.alloc(batch, heads, slots, head_dim, device)

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        self.codec.write(store._replace(calibration=self.calibration), keys, values, slots, write_mask, occupied)

    def keys(self, store: StageStore, at: At) -> Tensor:
        return self.codec.keys(store._replace(calibration=self.calibration), at)

    def values(self, store: StageStore, at: At) -> Tensor:
        return self.codec.values(store._replace(calibration=self.calibration), at)

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        return self.codec.score(store._replace(calibration=self.calibration), queries, rope)

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        return self.codec.mix(store._replace(calibration=self.calibration), weights)


def calibrated(folder: Path, dim: int = D, layers: int = 1, **meta: Any) -> str:
    """A folder with a calibration on tokens like those of `draw`."""
    keys, values = draw(64, dim, seed=0)
    fitted = fit_kvquant(keys.transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2))
    tensors = {f"{name}.{layer}": t.clone() for layer in range(layers) for name, t in fitted.items()}
    save(folder, "kvquant", {"model": None, "head_dim": dim, **meta}, tensors)
    return str(folder)


def made(folder: Path, bits: Any = 3, dim: int = D, **fields: Any) -> Opened:
    codec = KVQuant(bits=bits, calibration=calibrated(folder, dim), **fields)
    return Opened(codec, codec.load_calibration(0, "cpu"))


def closest(x: float, levels: list[float]) -> int:
    return min(range(len(levels)), key=lambda level: (abs(x - levels[level]), level))


def farthest(out: list[float], count: int) -> list[int]:
    return sorted(range(len(out)), key=lambda channel: (-out[channel], channel))[:count]


def half(x: float) -> float:
    return float(torch.tensor(x).half())


def key_formula(
    x: list[float], offset: list[float], width: list[float], calibration: KVQuantCalibration, count: int
) -> list[float]:
    inner = [(number - middle) / size for number, middle, size in zip(x, offset, width, strict=True)]
    apart = farthest([abs(number) for number in inner], count)
    levels = calibration.key_levels.tolist()
    read_ = calibration.key_decoded.tolist()
    coded = [read_[closest(n, levels)] * size + middle for n, middle, size in zip(inner, offset, width, strict=True)]
    return [half(x[channel]) if channel in apart else coded[channel] for channel in range(len(x))]


def value_formula(x: list[float], calibration: KVQuantCalibration, count: int) -> list[float]:
    middle = sorted(x)[(len(x) - 1) // 2]
    apart = farthest([abs(number - middle) for number in x], count)
    rest = [number for channel, number in enumerate(x) if channel not in apart]
    zero = half((max(rest) + min(rest)) / 2)
    scale = half((max(rest) - min(rest)) / 2)
    levels = calibration.value_levels.tolist()
    read_ = calibration.value_decoded.tolist()
    coded = [read_[closest((number - zero) / scale, levels)] * scale + zero for number in x]
    return [half(x[channel]) if channel in apart else coded[channel] for channel in range(len(x))]


@pytest.mark.parametrize("heads", [slice(0, 1), slice(1, 3)])
def test_a_shard_encodes_its_heads_as_the_whole_model_does(heads: slice, tmp_path: Path) -> None:
    whole = made(tmp_path)
    store, keys, values = stages.fill(whole, C, D)
    shard = StageStore(
        whole.codec.alloc(B, heads.stop - heads.start, C, D, "cpu"), whole.codec.load_calibration(0, "cpu", heads)
    )
    everything = at(range(C))[:, heads], flags([True] * C)[:, heads], flags([False] * C)[:, heads]
    whole.codec.write(shard, keys[:, heads], values[:, heads], *everything)
    for got, want in zip(stages.read(whole.codec, shard, C), stages.read(whole, store, C), strict=True):
        assert torch.equal(got, want[:, heads])


def test_it_is_a_codec_and_a_stage() -> None:
    codec = KVQuant(residual_length=32, block_size=32)
    assert isinstance(codec, Codec) and isinstance(codec, Stage) and codec.stages == (codec,)
    traits = codec.traits
    assert (traits.block, traits.group_size, traits.residual, traits.key_space) == (32, 1, 32, "unrotated")
    assert (traits.pins, traits.pinned) == ("first", 5) and KVQuant(sinks=0).traits.pins == "none"
    assert [codec.layout(tokens) for tokens in (68, 69, 100)] == [(68, ()), (69, (32,)), (69, (63,))]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("outliers", "count"), [(0.0, 0), (0.01, 1), (0.2, 4)])
def test_keys_and_values(tmp_path: Path, bits: int, norm: bool, outliers: float, count: int) -> None:
    stage = made(tmp_path, bits, norm=norm, outliers=outliers)
    store, keys, values = stages.fill(stage, 6, D, seed=5)
    got_keys, got_values = read(stage, store, 6)
    for b in range(B):
        for h in range(H):
            offset, width = (t[0, h, 0].tolist() for t in (stage.calibration.key_offset, stage.calibration.key_range))
            for token in range(6):
                want = key_formula(keys[b, h, token].tolist(), offset, width, stage.calibration, count)
                torch.testing.assert_close(got_keys[b, h, token], torch.tensor(want), atol=1e-4, rtol=1e-4)
                want = value_formula(values[b, h, token].tolist(), stage.calibration, count)
                torch.testing.assert_close(got_values[b, h, token], torch.tensor(want), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fields", [{}, {"bits": 2, "outliers": 0.0}, {"bits": 4, "norm": False, "outliers": 0.2}])
def test_a_stage_like_others(tmp_path: Path, fields: dict[str, Any]) -> None:
    stage = made(tmp_path, **fields)
    stages.check_rows(stage, C, D)
    stages.check_inactive(stage, C, D)
    stages.check_overwrite(stage, C, D, ())
    stages.check_ways_to_read(stage, C, D)
    stages.check_finite(stage, C, D)


@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128, 256])
def test_head_dimensions(tmp_path: Path, dim: int) -> None:
    stage = made(tmp_path, 3, dim)
    stage.codec.check(ModelInfo(1, H, dim))
    stages.check_rows(stage, 6, dim)
    store, keys, values = stages.fill(stage, C, dim, seed=0)
    got_keys, got_values = read(stage, store, C)
    assert error(got_keys, keys) < 0.1 and error(got_values, values) < 0.1
    assert store.codes.key_places.shape[-1] == max(1, round(dim / 100))


def test_more_bits_are_closer(tmp_path: Path) -> None:
    for side in (0, 1):
        errors: list[float] = []
        for bits in BITS:
            stage = made(tmp_path, bits, norm=False)
            store, *x = stages.fill(stage, C, D, seed=0)
            errors.append(error(read(stage, store, C)[side], x[side]))
        assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_a_value_of_equal_numbers_is_exact(tmp_path: Path) -> None:
    stage = made(tmp_path)
    store = empty(stage, C, D)
    x = torch.full((B, H, C, D), -3.25)
    stage.write(store, x, x, at(range(C)), flags([True] * C), flags([False] * C))
    assert torch.equal(stage.values(store, slice(0, C)), x)


def test_a_channel_without_a_range(tmp_path: Path) -> None:
    """A key that is at its offset there is decoded to that, and is no outlier."""
    fitted = fit_kvquant(*(x.transpose(0, 1).flatten(1, 2) for x in draw(64, D, seed=0)))
    fitted["keys.range"][..., 2] = 0
    save(tmp_path, "kvquant", {"model": None, "head_dim": D}, {f"{name}.0": t.clone() for name, t in fitted.items()})
    codec = KVQuant(calibration=str(tmp_path))
    stage = Opened(codec, codec.load_calibration(0, "cpu"))
    store = empty(stage, C, D)
    keys, values = draw(C, D)
    keys[..., 2] = stage.calibration.key_offset[..., 2]
    keys[..., 5] = 1000.0
    stage.write(store, keys, values, at(range(C)), flags([True] * C), flags([False] * C))
    found = stage.keys(store, slice(0, C))
    assert torch.allclose(found[..., 2], keys[..., 2]) and torch.equal(found[..., 5], keys[..., 5])


def test_one_book_for_all_heads(tmp_path: Path) -> None:
    fitted = fit_kvquant(*(x[:1, 0] for x in draw(64, D)), bits=(3,))
    save(tmp_path, "kvquant", {"model": None, "head_dim": D}, {f"{name}.0": t for name, t in fitted.items()})
    codec = KVQuant(calibration=str(tmp_path))
    codec.check(ModelInfo(1, 7, D))
    stages.check_ways_to_read(Opened(codec, codec.load_calibration(0, "cpu")), C, D)


def test_levels_are_read_by_their_norm(tmp_path: Path) -> None:
    plain = made(tmp_path, 2, norm=False).calibration
    normed = made(tmp_path, 2).calibration
    assert torch.equal(plain.key_levels, plain.key_decoded) and torch.equal(plain.key_levels, normed.key_levels)
    keys, values = draw(64, D, seed=0)
    inner = (keys - plain.key_offset) / plain.key_range
    inner = inner[inner.abs() <= 1]
    code = nearest(inner, normed.key_levels).long()
    torch.testing.assert_close(normed.key_decoded[code].mean(), inner.mean(), atol=1e-4, rtol=0)
    torch.testing.assert_close(normed.key_decoded[code].std(), inner.std(), atol=1e-4, rtol=0)
    assert plain.key_decoded[code].std() < 0.99 * inner.std()
    assert values.isfinite().all()


def test_ranges_are_percentiles() -> None:
    keys = torch.stack([torch.arange(1001.0), torch.arange(1001.0) * -2], -1)[torch.randperm(1001)][None]
    fitted = fit_kvquant(keys, torch.randn(1, 1001, 2), bits=(2,))
    assert fitted["keys.offset"].tolist() == [[500, -1000]] and fitted["keys.range"].tolist() == [[495, 990]]


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
    centres = torch.linspace(-1, 1, 2**bits) ** 3
    keys = centres[torch.arange(2000) % 2**bits][None, :, None] + torch.randn(1, 2000, 2) * 1e-3
    fitted = fit_kvquant(keys, keys, bits=(bits,))
    read_ = fitted[f"keys.levels.b{bits}"] * fitted["keys.range"].mean() + fitted["keys.offset"].mean()
    torch.testing.assert_close(read_, centres, atol=5e-3, rtol=0)
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


def test_bytes_are_known_without_memory() -> None:
    codes = KVQuant(bits=3).alloc(2, 8, 4096, 128, "meta")
    assert all(part.device.type == "meta" for part in codes)
    assert sum(part.nbytes for part in codes) == 2 * 8 * 4096 * (2 * (48 + 3) + 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"bits": 5},
        {"outliers": 1.0},
        {"outliers": -0.1},
        {"sinks": -1},
        {"residual_length": -1},
        {"block_size": 0},
        {"calibration": ""},
    ],
)
def test_it_refuses(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^KVQuant\.{next(iter(fields))} must be .*, got .*; try .*\.$"):
        KVQuant(**fields)


def test_the_calibration_must_fit(tmp_path: Path) -> None:
    codec = KVQuant(calibration=calibrated(tmp_path / "any", layers=2))
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


def test_nothing_to_write(tmp_path: Path) -> None:
    stage = made(tmp_path)
    nothing = torch.zeros(B, H, 0, D)
    store = empty(stage, 0, D)
    stage.write(store, nothing, nothing, at([]), flags([]), flags([]))
    assert all(part.shape == (B, H, 0, D) for part in read(stage, store, 0))


# tests/engine/test_compile.py compiles a whole step with this codec on every commit
@pytest.mark.filterwarnings("default")  # the compiler warns about itself
@pytest.mark.parametrize(
    "backend", [pytest.param("aot_eager", marks=pytest.mark.full), pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_it_compiles_whole(tmp_path: Path, backend: str) -> None:
    def compare(got: Tensor, want: Tensor) -> None:
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)

    stages.check_compiled(made(tmp_path), C, D, backend, compare)
