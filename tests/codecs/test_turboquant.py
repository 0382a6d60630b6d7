"""TurboQuant: levels of a normal distribution, norms, and what every stage must keep to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvpolicy.codecs._rotation import mix
from kvpolicy.codecs.turboquant import TurboQuant, normal_levels
from kvpolicy.protocols import Codec, ModelInfo, Stage
from tests.codecs import stages
from tests.codecs.stages import B, H, at, draw, empty, error, fill, flags, read

C = 12
D = 16


def made(bits: Any = 4, **fields: Any) -> TurboQuant:
    return TurboQuant(bits=bits, **fields)


@pytest.mark.parametrize(("bits", "loss"), [(1, 1 - 2 / math.pi), (2, 0.11748), (3, 0.03454), (4, 0.009497)])
def test_levels_are_the_means_of_what_is_nearest(bits: int, loss: float) -> None:
    levels = torch.tensor(normal_levels(bits), dtype=torch.float64)
    assert levels.shape == (2**bits,) and torch.equal(levels, -levels.flip(0)) and (levels.diff() > 0).all()
    x = torch.linspace(-9, 9, 900_001, dtype=torch.float64)
    density = torch.exp(-x.square() / 2)
    code = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
    mass = torch.zeros_like(levels).index_add(0, code, density)
    torch.testing.assert_close(
        torch.zeros_like(levels).index_add(0, code, density * x) / mass, levels, atol=1e-4, rtol=0
    )
    assert float((density * (x - levels[code]).square()).sum() / density.sum()) == pytest.approx(loss, rel=1e-3)


def test_it_is_a_codec_and_a_stage() -> None:
    codec = made(residual_length=32, block_size=32)
    assert isinstance(codec, Codec) and isinstance(codec, Stage) and codec.stages == (codec,)
    assert (codec.traits.block, codec.traits.group_size, codec.traits.residual) == (32, 1, 32)
    assert [codec.layout(tokens) for tokens in (63, 64, 1000)] == [(63, ()), (64, (32,)), (64, (968,))]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_keys_are_a_norm_and_the_nearest_levels(bits: int) -> None:
    codec = made(bits, seed=5)
    store, keys, _ = fill(codec, C, D)
    norm = keys.norm(dim=-1, keepdim=True)
    levels = torch.tensor(normal_levels(bits))
    normal = mix(keys, 5) / norm * D**0.5
    nearest = (normal[..., None] - levels).abs().argmin(-1)
    want = levels[nearest] * norm.half() / D**0.5
    torch.testing.assert_close(mix(codec.keys(store, slice(0, C)), 5), want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(store.codes.key_scale, norm.half())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_values_are_uniform_codes_of_a_token(bits: int) -> None:
    codec = made(bits)
    store, _, values = fill(codec, C, D)
    zero = values.amin(-1, keepdim=True).half().float()
    scale = ((values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True)) / (2**bits - 1)).half().float()
    want = ((values - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero
    assert torch.equal(codec.values(store, slice(0, C)), want)
    equal = torch.full((B, H, C, D), -3.25)
    codec.write(store, equal, equal, at(range(C)), flags([True] * C), flags([False] * C))
    assert torch.equal(codec.values(store, slice(0, C)), equal)


def test_errors_are_near_those_of_a_normal_number() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(B, H, 64, 128, generator=generator)
    keys[..., 3] *= 30
    for bits, loss in ((2, 0.1175), (3, 0.03454), (4, 0.009497)):
        codec = made(bits)
        store = empty(made(bits), 64, 128)
        codec.write(store, keys, keys, at(range(64)), flags([True] * 64), flags([False] * 64))
        lost = (codec.keys(store, slice(0, 64)) - keys).square().sum() / keys.square().sum()
        assert float(lost) == pytest.approx(loss, rel=0.2)


def test_the_seed_changes_the_codes_and_not_the_error() -> None:
    one, other = (fill(made(4, seed=seed), 64, 64)[0] for seed in (0, 1))
    keys, _ = draw(64, 64)
    assert not torch.equal(one.codes.keys, other.codes.keys)
    for seed, store in enumerate((one, other)):
        assert error(made(4, seed=seed).keys(store, slice(0, 64)), keys) < 0.1


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_zero_is_exact(bits: int) -> None:
    codec = made(bits)
    store = empty(made(bits), C, D)
    x = torch.zeros(B, H, C, D)
    codec.write(store, x, x, at(range(C)), flags([True] * C), flags([False] * C))
    assert not any(part.any() for part in read(codec, store, C))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128, 256])
def test_it_is_a_good_stage(bits: int, dim: int) -> None:
    stages.check_ways_to_read(made(bits), 6, dim)
    stages.check_rows(made(bits), 6, dim)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_slots_are_taken_again(bits: int) -> None:
    stages.check_inactive(made(bits), C, D)
    stages.check_overwrite(made(bits), C, D, ())
    stages.check_finite(made(bits), C, D)


def test_longer_than_a_chunk() -> None:
    stages.check_ways_to_read(made(), 2100, 8)


@pytest.mark.parametrize(("bits", "dim", "per_number"), [(2, 128, 2.1875), (3, 128, 3.1875), (4, 128, 4.1875)])
def test_bytes_are_known_without_memory(bits: int, dim: int, per_number: float) -> None:
    codes = made(bits).alloc(2, 8, 4096, dim, "meta")
    assert all(part.device.type == "meta" for part in codes)
    assert sum(part.nbytes for part in codes) == 2 * 8 * 4096 * dim * 2 * per_number / 8


def test_vectors_must_fill_bytes() -> None:
    made(4).check(ModelInfo(1, 1, 10))
    made(2).check(ModelInfo(1, 1, 100))
    with pytest.raises(ValueError, match=r"multiple of 8 for TurboQuant\.bits=3, got 100; try bits=4"):
        made(3).check(ModelInfo(1, 1, 100))
    with pytest.raises(ValueError, match="got 5; try MiKV"):
        made(4).check(ModelInfo(1, 1, 5))


@pytest.mark.parametrize("parameters", [{"bits": 5}, {"seed": -1}, {"residual_length": -1}, {"block_size": 0}])
def test_it_refuses(parameters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^TurboQuant\.{next(iter(parameters))} must be .*, got .*; try .*\.$"):
        TurboQuant(**parameters)


def test_nothing_to_write() -> None:
    codec = made()
    store = empty(made(), 0, D)
    codec.write(store, *draw(0, D), at([]), flags([]), flags([]))
    assert codec.keys(store, slice(0, 0)).shape == (B, H, 0, D)


@pytest.mark.filterwarnings("default")  # the compiler warns about itself
def test_it_compiles_whole() -> None:
    stages.check_compiled(made(3), C, 24, "aot_eager", torch.testing.assert_close)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_it_compiles_for_another_model_and_other_bits() -> None:
    torch.compiler.reset()
    for bits, dim in ((3, 24), (4, 16)):  # constants of another shape in the same places
        stages.check_compiled(made(bits), C, dim, "aot_eager", torch.testing.assert_close)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_it_compiles_to_kernels() -> None:
    stages.check_compiled(made(4), C, 24, "inductor", torch.testing.assert_close)
