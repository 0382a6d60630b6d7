"""Codecs that encode every token by itself: what their slow versions leave open about rounding, ties and mixing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy import BFP, RotateKV, TokenWise
from kvpolicy.codecs.rotation import constant_result, mix, mixing, unmix
from kvpolicy.protocols import Stage, StageStore
from tests.codecs.stages import B, H, at, draw, empty, flags, read


def written(stage: Stage, x: torch.Tensor) -> StageStore:
    """A store of tokens [n, D] or [B, H, n, D], as keys and as values."""
    count, dim = x.shape[-2:]
    store = empty(stage, count, dim)
    x = x.expand(B, H, count, dim)
    stage.write(store, x, x, at(range(count)), flags([True] * count), flags([False] * count))
    return store


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_normalizer_of_many_tokens_in_half_precision(dtype: torch.dtype) -> None:
    """Their sum is far above what the dtype can count, and above the range of fp16."""
    keys = (draw(5000, 4)[0] + 30).to(dtype)
    store = written(TokenWise(), keys)
    mean = keys.double().mean(2, keepdim=True)
    std = keys.double().std(2, correction=0, keepdim=True)
    torch.testing.assert_close(store.codes.channel_zero.double(), mean, rtol=2**-11, atol=0)
    torch.testing.assert_close(store.codes.channel_scale.double(), std, rtol=2**-10, atol=0)


def test_ties_are_rounded_to_even_and_the_largest_is_clipped() -> None:
    store = written(BFP(mantissa=4), torch.tensor([[4.0, 0.5, 1.5, 2.5, -2.5, 7.9]]))
    assert read(BFP(mantissa=4), store, 1)[0][0, 0, 0].tolist() == [4, 0, 2, 2, -2, 7]


def test_channels_of_equal_norm_keep_their_order() -> None:
    x = torch.tensor([1.0, -2, 1, 2, 1, -1]).repeat(50)
    order = written(BFP(), x[None]).codes.order[0, 0, 0].tolist()
    assert order == sorted(range(300), key=lambda channel: -abs(float(x[channel])))


def test_small_keys_count_beside_a_large_one() -> None:
    """In fp32, 2^24 + 1 + 1 is 2^24, so that both channels would be of equal norm."""
    store = written(BFP(), torch.tensor([[4096.0, 4096.0], [1.0, 1.0], [0.0, 1.0]]))
    assert store.codes.order[0, 0, 0].tolist() == [1, 0]


@pytest.mark.parametrize("mantissa", [3, 4, 5, 6, 8])
def test_the_least_and_the_greatest_numbers(mantissa: Any) -> None:
    """The least ones are coded or zero, and the greatest one stays finite."""
    least = 1.5 * 2.0 ** torch.arange(-149, -99).float()[:, None]
    codec = BFP(mantissa=mantissa)
    for got in read(codec, written(codec, least), 50):
        assert torch.equal(got, torch.where(least < 2.0 ** (mantissa - 2 - 126), 0, least).expand_as(got))
    for got in read(codec, written(codec, torch.full((1, 20), torch.finfo(torch.float32).max)), 1):
        assert bool(got.isfinite().all()) and bool((got > 2.0**127).all())


@pytest.mark.parametrize("seed", [None, 0, 7])
@pytest.mark.parametrize("dim", [1, 2, 5, 8, 64, 80, 96, 100, 128, 256])
def test_mixing_is_orthonormal_and_undone(dim: int, seed: int | None) -> None:
    matrix = mixing(dim, seed, torch.device("cpu"))
    x = torch.randn(2, 3, dim)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim), atol=1e-6, rtol=0)
    torch.testing.assert_close(mix(x, seed), x @ matrix.T, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(unmix(x, seed), x @ matrix, atol=1e-5, rtol=1e-5)


def test_signs_are_those_of_the_seed() -> None:
    plain, one, other = (mixing(64, seed, torch.device("cpu")) for seed in (None, 1, 2))
    assert torch.equal(one.abs(), plain.abs()) and not torch.equal(one, other)
    assert torch.equal((one / plain)[0].expand(64, -1), one / plain), "a sign belongs to a channel"


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_equal_mixed_numbers_are_exact(bits: Any) -> None:
    codec = RotateKV(bits=bits, group_size=16)
    for constant in (-3.25, 7.5, 0.0):
        x = unmix(torch.full((B, H, 12, 16), constant))
        assert all(torch.equal(part, x) for part in read(codec, written(codec, x), 12))


def test_the_mark_of_constant_results_is_that_of_pytorch() -> None:
    """Its own function imports the compiler."""

    def ours() -> int:
        return 1

    def theirs() -> int:
        return 1

    assert constant_result(ours) is ours
    assert vars(ours) == vars(torch.compiler.assume_constant_result(theirs)) != {}
