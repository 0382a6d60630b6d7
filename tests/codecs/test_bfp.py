"""BFP: rounding, and the order of channels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy.codecs.bfp import BFP
from kvpolicy.protocols import ModelInfo
from tests.codecs import stages
from tests.codecs.stages import B, H, at, draw, empty, fill, flags, read

C = 12
D = 20
MANTISSAS = [3, 4, 5, 6, 8]


def made(mantissa: Any = 4, **fields: Any) -> BFP:
    return BFP(mantissa=mantissa, **fields)


def test_ties_are_rounded_to_even_and_the_largest_is_clipped() -> None:
    codec = made(4)
    store = empty(made(4), 1, 6)
    x = torch.tensor([4.0, 0.5, 1.5, 2.5, -2.5, 7.9]).expand(B, H, 1, 6)
    codec.write(store, x, x, at([0]), flags([True]), flags([False]))
    assert codec.keys(store, slice(0, 1))[0, 0, 0].tolist() == [4, 0, 2, 2, -2, 7]


def test_channels_of_equal_norm_keep_their_order() -> None:
    x = torch.tensor([1.0, -2, 1, 2, 1, -1]).repeat(50)
    codec = made()
    store = empty(made(), 1, 300)
    some = x.expand(B, H, 1, 300)
    codec.write(store, some, some, at([0]), flags([True]), flags([False]))
    assert store.codes.order[0, 0, 0].tolist() == sorted(range(300), key=lambda channel: -abs(float(x[channel])))


def test_small_keys_count_beside_a_large_one() -> None:
    """In fp32, 2^24 + 1 + 1 is 2^24, so that both channels would be of equal norm."""
    store = empty(made(), 4, 2)
    keys = torch.tensor([[4096.0, 4096.0], [1.0, 1.0], [0.0, 1.0]]).expand(B, H, -1, -1)
    made().write(store, keys, keys, at(range(3)), flags([True] * 3), flags([False] * 4))
    assert store.codes.order[0, 0, 0].tolist() == [1, 0]


def test_the_order_of_tokens_does_not_matter() -> None:
    stages.check_order(made(), 1500, 256, ("order",))


@pytest.mark.parametrize("mantissa", MANTISSAS)
def test_the_least_numbers_are_coded_or_zero(mantissa: int) -> None:
    codec = made(mantissa)
    store = empty(made(mantissa), 50, 1)
    x = (1.5 * 2.0 ** torch.arange(-149, -99).float())[:, None].expand(B, H, 50, 1)
    codec.write(store, x, x, at(range(50)), flags([True] * 50), flags([False] * 50))
    for got in read(codec, store, 50):
        assert torch.equal(got, torch.where(x < 2.0 ** (mantissa - 2 - 126), 0, x))


def test_the_order_is_fitted_to_active_tokens_of_a_head_without_others() -> None:
    codec = made()
    store, _, _ = fill(codec, C, D)
    before = store.codes.order.clone()
    keys, values = draw(C, D, seed=1)
    keys[:, :, :4] *= torch.arange(D) + 1.0
    keys[:, :, 4:] = torch.nan
    occupied = torch.ones(B, H, C, dtype=torch.bool)
    occupied[0, 1] = False
    codec.write(store, keys, values, at(range(C)), flags([slot < 4 for slot in range(C)]), occupied)
    norm = keys[0, 1, :4].double().square().sum(0)
    assert store.codes.order[0, 1, 0].tolist() == norm.argsort(descending=True).tolist()
    assert torch.equal(store.codes.order[1], before[1]) and torch.equal(store.codes.order[0, 2], before[0, 2])


def test_exact_values() -> None:
    codec = made(exact_values=True)
    store, _, values = fill(codec, C, D)
    assert torch.equal(codec.values(store, slice(0, C)), values.half().float())
    large = torch.full((B, H, 1, D), 1e6)
    codec.write(store, large, -large, at([0]), flags([True]), flags([True] * C))
    assert (codec.values(store, slice(0, 1)) == -65504).all()


def test_the_greatest_numbers_stay_finite() -> None:
    for mantissa in MANTISSAS:
        codec = made(mantissa)
        store = empty(codec, 1, D)
        x = torch.full((B, H, 1, D), torch.finfo(torch.float32).max)
        codec.write(store, x, x, at([0]), flags([True]), flags([False]))
        assert all(part.isfinite().all() and (part > 2.0**127).all() for part in read(codec, store, 1))


def test_zeros_are_zeros() -> None:
    codec = made()
    store = empty(made(), C, D)
    assert not any(part.any() for part in read(codec, store, C)), "nor does an empty slot hold anything"
    zero = torch.zeros(B, H, C, D)
    codec.write(store, zero, zero, at(range(C)), flags([True] * C), flags([False] * C))
    assert not any(part.any() for part in read(codec, store, C))
    assert (store.codes.keys == 0x88).all(), "of a mantissa of 4 bits, 8 is zero"


def test_channels_must_have_a_number() -> None:
    made().check(ModelInfo(1, 1, 2**15))
    with pytest.raises(ValueError, match="at most 32768 for BFP, got 32769; try KIVI"):
        made().check(ModelInfo(1, 1, 2**15 + 1))
