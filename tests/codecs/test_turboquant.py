"""TurboQuant: levels of a normal distribution, and norms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvpolicy.codecs.turboquant import TurboQuant, normal_levels
from kvpolicy.protocols import ModelInfo
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


def test_vectors_must_fill_bytes() -> None:
    made(4).check(ModelInfo(1, 1, 10))
    made(2).check(ModelInfo(1, 1, 100))
    with pytest.raises(ValueError, match=r"multiple of 8 for TurboQuant\.bits=3, got 100; try bits=4"):
        made(3).check(ModelInfo(1, 1, 100))
    with pytest.raises(ValueError, match="got 5; try MiKV"):
        made(4).check(ModelInfo(1, 1, 5))
