"""TokenWise against its formula, and what every stage must keep to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.codecs.tokenwise import (
    TokenWise,
    _from_e4m3,  # pyright: ignore[reportPrivateUsage]
    _to_e4m3,  # pyright: ignore[reportPrivateUsage]
)
from kvpolicy.protocols import Codec, ModelInfo, Stage
from tests.codecs import stages
from tests.codecs.stages import B, H, at, draw, empty, error, fill, flags, read
from tests.sampling import product

C = 12
D = 16
BITS = [2, 3, 4, 8, "fp8"]


def made(bits: Any = 4, **fields: Any) -> TokenWise:
    return TokenWise(bits=bits, **fields)


def formula(x: Tensor, bits: int | str) -> Tensor:
    """A flat group, quantized and back."""
    if bits == "fp8":
        scale = (x.abs().max() / 448).half().float()
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    levels = 2 ** int(bits) - 1
    zero = x.min().half().float()
    scale = ((x.max() - x.min()) / levels).half().float()
    return ((x - zero) / scale).round().clamp(0, levels) * scale + zero


def test_it_is_a_codec_and_a_stage() -> None:
    codec = made(residual_length=32, block_size=32)
    assert isinstance(codec, Codec) and isinstance(codec, Stage) and codec.stages == (codec,)
    assert (codec.traits.block, codec.traits.group_size, codec.traits.residual) == (32, 1, 32)
    assert [codec.layout(tokens) for tokens in (63, 64, 70)] == [(63, ()), (64, (32,)), (64, (38,))]
    codec.check(ModelInfo(1, 1, 7))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_normaliser_of_many_tokens_in_half_precision(dtype: torch.dtype) -> None:
    """Their sum is far above what the dtype can count, and above the range of fp16."""
    count = 5000
    store = empty(made(), count, 4)
    keys = (draw(count, 4)[0] + 30).to(dtype)
    made().write(store, keys, keys, at(range(count)), flags([True] * count), flags([False] * count))
    mean = keys.double().mean(2, keepdim=True)
    std = keys.double().std(2, correction=0, keepdim=True)
    torch.testing.assert_close(store.codes.channel_zero.double(), mean, rtol=2**-11, atol=0)
    torch.testing.assert_close(store.codes.channel_scale.double(), std, rtol=2**-10, atol=0)


@pytest.mark.parametrize("bits", BITS)
def test_groups_of_one_token_after_the_normaliser(bits: int | str) -> None:
    codec = made(bits, group_size=8)
    store, keys, values = fill(codec, C, D)
    mean = keys.double().mean(2).half().float()
    std = keys.double().std(2, correction=0).half().float()
    got_keys, got_values = read(codec, store, C)
    for b in range(B):
        for h in range(H):
            for token in range(C):
                for first in (0, 8):
                    some = slice(first, first + 8)
                    normal = (keys[b, h, token, some] - mean[b, h, some]) / std[b, h, some]
                    back = formula(normal, bits) * std[b, h, some] + mean[b, h, some]
                    torch.testing.assert_close(got_keys[b, h, token, some], back, atol=1e-4, rtol=1e-4)
                    assert torch.equal(got_values[b, h, token, some], formula(values[b, h, token, some], bits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_coded_in_fp32(dtype: torch.dtype) -> None:
    codec = made(3)
    keys, values = draw(C, D)
    given = [(keys.to(dtype), values.to(dtype)), (keys.to(dtype).float(), values.to(dtype).float())]
    stores = [empty(codec, C, D), empty(codec, C, D)]
    for store, some in zip(stores, given, strict=True):
        codec.write(store, *some, at(range(C)), flags([True] * C), flags([False] * C))
    assert stages.same(*stores)


def test_the_normaliser_is_what_makes_keys_cheap() -> None:
    errors: list[float] = []
    for normalize in (True, False):
        codec = made(4, normalize=normalize)
        store, keys, _ = fill(codec, 64, 64)
        errors.append(error(codec.keys(store, slice(0, 64)), keys))
    assert errors[0] < 0.02 and errors[1] > 2 * errors[0]


def test_e4m3_is_that_of_torch() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    numbers = every.view(torch.float8_e4m3fn).float()
    finite = ~numbers.isnan()
    assert torch.equal(_from_e4m3(every)[finite], numbers[finite])
    assert torch.equal(_to_e4m3(numbers[finite & (every != 128)]), every[finite & (every != 128)])  # 128 is -0
    ordered = numbers[finite].unique()
    between = (ordered[1:] + ordered[:-1]) / 2
    near = torch.cat([ordered, between, between.nextafter(ordered[1:]), between.nextafter(ordered[:-1])])
    assert torch.equal(_from_e4m3(_to_e4m3(near)), near.to(torch.float8_e4m3fn).float())
    assert _from_e4m3(_to_e4m3(torch.tensor([1e9, -1e9]))).tolist() == [448, -448]


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


def test_only_active_tokens_fit_the_normaliser() -> None:
    codec = made()
    keys, values = draw(C, D)
    keys[:, :, 7:] = torch.nan
    store = empty(codec, C, D)
    codec.write(store, keys, values, at(range(C)), flags([slot < 7 for slot in range(C)]), flags([False] * C))
    assert torch.equal(store.codes.channel_zero, keys[:, :, :7].double().mean(2, keepdim=True).half())


def test_a_head_without_tokens_starts_anew() -> None:
    codec = made()
    store, _, _ = fill(codec, C, D)
    before = store.codes.channel_zero.clone()
    keys, values = draw(4, D, seed=5)
    occupied = torch.ones(B, H, C, dtype=torch.bool)
    occupied[1, 2] = False
    codec.write(store, keys + 3, values, at(range(4)), flags([True] * 4), occupied)
    fresh = torch.zeros(B, H, dtype=torch.bool)
    fresh[1, 2] = True
    assert torch.equal((store.codes.channel_zero != before).any(-1).squeeze(-1), fresh)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [5, 64, 80, 96, 128, 256])
def test_it_is_a_good_stage(bits: Any, dim: int) -> None:
    codec = made(bits)
    stages.check_ways_to_read(codec, 6, dim)
    stages.check_rows(codec, 6, dim)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_slots_are_taken_again(bits: Any, normalize: bool) -> None:
    codec = made(bits, normalize=normalize)
    stages.check_inactive(codec, C, D)
    stages.check_overwrite(codec, C, D, ("channel_scale", "channel_zero"))
    stages.check_finite(codec, C, D)


def test_the_order_of_tokens_does_not_matter() -> None:
    stages.check_order(made(), 1500, 256, ("channel_scale", "channel_zero"))


def test_longer_than_a_chunk() -> None:
    stages.check_ways_to_read(made(2), 2100, 8)


@pytest.mark.parametrize(
    ("bits", "dim", "per_number"), [(2, 128, 2.25), (3, 128, 3.25), (4, 256, 4.25), (8, 80, 8.4), ("fp8", 128, 8.125)]
)
def test_bytes_are_known_without_memory(bits: Any, dim: int, per_number: float) -> None:
    codes = made(bits).alloc(2, 8, 4096, dim, "meta")
    assert all(part.device.type == "meta" for part in codes)
    normaliser = 2 * 8 * dim * 2 * 2
    assert sum(part.nbytes for part in codes) - normaliser == 2 * 8 * 4096 * dim * 2 * per_number / 8


@pytest.mark.parametrize(
    "parameters", [{"bits": 5}, {"bits": "4"}, {"group_size": 0}, {"residual_length": -1}, {"block_size": 0}]
)
def test_it_refuses(parameters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^TokenWise\.{next(iter(parameters))} must be .*, got .*; try .*\.$"):
        TokenWise(**parameters)


def test_nothing_to_write() -> None:
    codec = made()
    store = empty(codec, 0, D)
    codec.write(store, *draw(0, D), at([]), flags([]), flags([]))
    assert codec.keys(store, slice(0, 0)).shape == (B, H, 0, D)


@pytest.mark.filterwarnings("default")  # the compiler warns about itself
@product("bits", [3, "fp8"], sample=[(3,)])
def test_it_compiles_whole(bits: Any) -> None:
    stages.check_compiled(made(bits), C, D, "aot_eager", torch.testing.assert_close)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("bits", [4, "fp8"])
def test_it_compiles_to_kernels(bits: Any) -> None:
    stages.check_compiled(made(bits), C, D, "inductor", torch.testing.assert_close)
