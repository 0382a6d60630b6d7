"""TokenWise: the normalizer, and what is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy.codecs.tokenwise import TokenWise
from tests.codecs.stages import B, H, at, draw, empty, error, flags, read

C = 12
D = 16


def made(bits: Any = 4, **fields: Any) -> TokenWise:
    return TokenWise(bits=bits, **fields)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_normalizer_of_many_tokens_in_half_precision(dtype: torch.dtype) -> None:
    """Their sum is far above what the dtype can count, and above the range of fp16."""
    count = 5000
    store = empty(made(), count, 4)
    keys = (draw(count, 4)[0] + 30).to(dtype)
    made().write(store, keys, keys, at(range(count)), flags([True] * count), flags([False] * count))
    mean = keys.double().mean(2, keepdim=True)
    std = keys.double().std(2, correction=0, keepdim=True)
    torch.testing.assert_close(store.codes.channel_zero.double(), mean, rtol=2**-11, atol=0)
    torch.testing.assert_close(store.codes.channel_scale.double(), std, rtol=2**-10, atol=0)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_equal_numbers_are_exact(bits: int) -> None:
    codec = made(bits)
    store = empty(made(bits), C, D)
    x = torch.full((B, H, C, D), -3.25)
    codec.write(store, x, x, at(range(C)), flags([True] * C), flags([False] * C))
    assert all(torch.equal(part, x) for part in read(codec, store, C))


def test_one_token_is_a_mean_and_deviates_by_one() -> None:
    codec = made(8)
    keys, values = draw(1, D)
    store = empty(codec, C, D)
    codec.write(store, keys, values, at([5]), flags([True]), flags([False] * C))
    assert (store.codes.channel_scale == 1).all()
    assert torch.equal(store.codes.channel_zero, keys.half())


def test_the_error_of_a_mean_does_not_spoil_its_group() -> None:
    """The mean of a channel that hardly varies and is far from zero is rounded by more than its deviation."""
    codec = made(4)
    keys, values = draw(C, D)
    keys[..., 0] = 1000.2 + 1e-4 * keys[..., 0]
    store = empty(codec, C, D)
    codec.write(store, keys, values, at(range(C)), flags([True] * C), flags([False] * C))
    assert error(codec.keys(store, slice(0, C))[..., 1:], keys[..., 1:]) < 0.02
