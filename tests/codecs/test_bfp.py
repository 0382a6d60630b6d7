"""BFP against its formula, and what every stage must keep to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvpolicy.codecs.bfp import BFP
from kvpolicy.protocols import Codec, ModelInfo, Stage
from tests.codecs import stages
from tests.codecs.stages import B, H, at, draw, empty, error, fill, flags, read
from tests.sampling import product

C = 12
D = 20
MANTISSAS = [3, 4, 5, 6, 8]


def made(mantissa: Any = 4, **fields: Any) -> BFP:
    return BFP(mantissa=mantissa, **fields)


def formula(block: list[float], mantissa: int) -> list[float]:
    """A block in sign and magnitude, and back."""
    largest = max(map(abs, block))
    if largest == 0:
        return block
    step = 2.0 ** (math.frexp(largest)[1] - 1 - (mantissa - 2))
    most = 2 ** (mantissa - 1) - 1
    return [max(-most, min(most, round(x / step))) * step for x in block]  # round() is to even


def test_it_is_a_codec_and_a_stage() -> None:
    codec = made(residual_length=32, block_size=32)
    assert isinstance(codec, Codec) and isinstance(codec, Stage) and codec.stages == (codec,)
    assert (codec.traits.block, codec.traits.group_size, codec.traits.residual) == (32, 1, 32)
    assert [codec.layout(tokens) for tokens in (63, 64, 70)] == [(63, ()), (64, (32,)), (64, (38,))]


@pytest.mark.parametrize("mantissa", MANTISSAS)
def test_blocks_of_sorted_channels(mantissa: int) -> None:
    codec = made(mantissa, block_channels=8)  # the last block of 20 channels has 4
    store, keys, values = fill(codec, C, D)
    got_keys, got_values = read(codec, store, C)
    for b in range(B):
        for h in range(H):
            norm = keys[b, h].double().square().sum(0).tolist()
            order = sorted(range(D), key=lambda channel: (-norm[channel], channel))
            assert store.codes.order[b, h, 0].tolist() == order
            for token in range(C):
                for first in range(0, D, 8):
                    some = order[first : first + 8]
                    assert got_keys[b, h, token, some].tolist() == formula(keys[b, h, token, some].tolist(), mantissa)
                    some = list(range(D))[first : first + 8]
                    block = values[b, h, token, some].tolist()
                    assert got_values[b, h, token, some].tolist() == formula(block, mantissa)


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


def test_sorting_helps_small_channels() -> None:
    generator = torch.Generator().manual_seed(0)
    size = torch.where(torch.arange(64) % 8 == 0, 100.0, 1.0)
    x = torch.randn(B, H, C, 64, generator=generator) * size
    codec = made(4, block_channels=8)
    store = empty(made(4, block_channels=8), C, 64)
    codec.write(store, x, x, at(range(C)), flags([True] * C), flags([False] * C))
    small = size == 1
    sorted_, plain = (error(got[..., small], x[..., small]) for got in read(codec, store, C))
    assert sorted_ < plain / 10


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


@pytest.mark.parametrize("mantissa", MANTISSAS)
@pytest.mark.parametrize("dim", [5, 64, 80, 96, 128, 256])
def test_it_is_a_good_stage(mantissa: int, dim: int) -> None:
    codec = made(mantissa)
    stages.check_ways_to_read(codec, 6, dim)
    stages.check_rows(codec, 6, dim)


@pytest.mark.parametrize("exact_values", [True, False])
@pytest.mark.parametrize("mantissa", MANTISSAS)
def test_slots_are_taken_again(mantissa: int, exact_values: bool) -> None:
    codec = made(mantissa, exact_values=exact_values, block_channels=8)
    stages.check_inactive(codec, C, D)
    stages.check_overwrite(codec, C, D, ("order",))
    stages.check_finite(codec, C, D)


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


@pytest.mark.parametrize(
    ("mantissa", "fields", "per_number"),
    [(4, {}, 4.25), (3, {}, 3.25), (8, {"block_channels": 128}, 8.0625), (4, {"exact_values": True}, (4.25 + 16) / 2)],
)
def test_bytes_are_known_without_memory(mantissa: int, fields: dict[str, Any], per_number: float) -> None:
    codes = made(mantissa, **fields).alloc(2, 8, 4096, 128, "meta")
    assert all(part.device.type == "meta" for part in codes)
    order = 2 * 8 * 128 * 2
    assert sum(part.nbytes for part in codes) - order == 2 * 8 * 4096 * 128 * 2 * per_number / 8


@pytest.mark.parametrize(
    "parameters", [{"mantissa": 7}, {"block_channels": 0}, {"residual_length": -1}, {"block_size": 0}]
)
def test_it_refuses(parameters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^BFP\.{next(iter(parameters))} must be .*, got .*; try .*\.$"):
        BFP(**parameters)


def test_channels_must_have_a_number() -> None:
    made().check(ModelInfo(1, 1, 2**15))
    with pytest.raises(ValueError, match="at most 32768 for BFP, got 32769; try KIVI"):
        made().check(ModelInfo(1, 1, 2**15 + 1))


def test_nothing_to_write() -> None:
    codec = made()
    store = empty(codec, 0, D)
    codec.write(store, *draw(0, D), at([]), flags([]), flags([]))
    assert codec.keys(store, slice(0, 0)).shape == (B, H, 0, D)


@pytest.mark.filterwarnings("default")  # the compiler warns about itself
@product("exact_values", [True, False], sample=[(False,)])
def test_it_compiles_whole(exact_values: bool) -> None:
    codec = made(5, exact_values=exact_values, block_channels=8)
    stages.check_compiled(codec, C, D, "aot_eager", torch.testing.assert_close)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_it_compiles_to_kernels() -> None:
    stages.check_compiled(made(4, block_channels=8), C, D, "inductor", torch.testing.assert_close)
