"""RotateKV, and the mixing of channels that it shares with TurboQuant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy.codecs.rotate import RotateKV
from kvpolicy.codecs.rotation import mix, mixing, unmix
from tests.codecs.stages import B, H, at, empty, fill, flags, read

C = 12
D = 16
CPU = torch.device("cpu")


def made(bits: Any = 4, group_size: int = 8, **fields: Any) -> RotateKV:
    return RotateKV(bits=bits, group_size=group_size, **fields)


# ---- Mixing


@pytest.mark.parametrize("seed", [None, 0, 7])
@pytest.mark.parametrize("dim", [1, 2, 5, 8, 64, 80, 96, 100, 128, 256])
def test_mixing_is_orthonormal_and_undone(dim: int, seed: int | None) -> None:
    matrix = mixing(dim, seed, CPU)
    x = torch.randn(2, 3, dim)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim), atol=1e-6, rtol=0)
    torch.testing.assert_close(mix(x, seed), x @ matrix.T, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(unmix(x, seed), x @ matrix, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(unmix(mix(x, seed), seed), x, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_every_channel_reaches_every_other(dim: int) -> None:
    odd = dim // (dim & -dim)
    assert mixing(dim, None, CPU).abs().max() <= (2 / dim if odd > 1 else 1 / dim) ** 0.5 + 1e-6
    assert (mixing(dim, None, CPU) != 0).float().mean() > 0.8


def test_signs_are_those_of_the_seed() -> None:
    plain, one, other = (mixing(64, seed, CPU) for seed in (None, 1, 2))
    assert torch.equal(one.abs(), plain.abs()) and not torch.equal(one, other)
    assert torch.equal((one / plain)[0].expand(64, -1), one / plain), "a sign belongs to a channel"


def test_no_sum_depends_on_the_batch() -> None:
    x = torch.randn(5, 7, 80)
    assert torch.equal(mix(x, 3)[2, 4], mix(x[2, 4], 3)) and torch.equal(unmix(x)[1:2, :3], unmix(x[1:2, :3]))


# ---- RotateKV


def test_one_group_needs_no_order() -> None:
    store, _, _ = fill(made(group_size=16), C, D)
    assert not store.codes.place.any()


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("constant", [-3.25, 7.5, 0.0])
def test_a_group_of_equal_numbers_is_exact(bits: int, constant: float) -> None:
    codec = made(bits, 16)
    store = empty(made(bits, 16), C, D)
    mixed = torch.full((B, H, C, D), constant)
    x = unmix(mixed)
    codec.write(store, x, x, at(range(C)), flags([True] * C), flags([False] * C))
    assert all(torch.equal(part, x) for part in read(codec, store, C))
