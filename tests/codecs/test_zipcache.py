"""ZipCache: channels and tokens, the layout of two precisions, and what every stage must keep to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.codecs.zipcache import ZipCache, ZipCacheStage
from kvpolicy.protocols import Codec, Layout, ModelInfo, Stage
from tests.codecs import stages
from tests.codecs.stages import B, H, at, draw, empty, error, fill, flags, read

C = 12
D = 16
CHANNELS = ("key_channel_scale", "value_channel_scale")


def made(bits: int = 4) -> ZipCacheStage:
    return ZipCacheStage(bits=bits)


def formula(x: Tensor, bits: int) -> Tensor:
    """All tokens of a head [..., n, D], quantized and back."""
    channel = x.abs().amax(-2, keepdim=True).sqrt().half().float()
    normal = x / channel
    zero = normal.amin(-1, keepdim=True).half().float()
    scale = ((normal.amax(-1, keepdim=True) - normal.amin(-1, keepdim=True)) / (2**bits - 1)).half().float()
    return (((normal - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero) * channel


def test_it_is_a_codec_of_two_stages() -> None:
    codec = ZipCache(high_bits=8, bits=3)
    assert isinstance(codec, Codec) and isinstance(made(), Stage)
    assert codec.stages == (made(8), made(3))
    traits = codec.traits
    assert (traits.block, traits.group_size, traits.residual, traits.demote_by, traits.recode_all) == (
        100,
        1,
        0,
        "priority",
        True,
    )
    codec.check(ModelInfo(1, 1, 7))


@pytest.mark.parametrize(
    ("tokens", "layout"),
    [(0, Layout(0)), (99, Layout(99)), (100, Layout(100, (60, 40))), (1001, Layout(100, (601, 400)))],
)
def test_layout(tokens: int, layout: Layout) -> None:
    assert ZipCache(recode_every=100).layout(tokens) == layout


@pytest.mark.parametrize("high", [0.0, 0.07, 0.5, 1.0])
def test_every_token_has_a_slot(high: float) -> None:
    for tokens in range(100, 400):
        assert sum(ZipCache(high=high).layout(tokens).coded) == tokens
    assert ZipCache(high=0.07).layout(100).coded == (7, 93)  # 0.07 * 100 is a little more than 7


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_tokens_after_channels(bits: int) -> None:
    store, keys, values = fill(made(bits), C, D)
    for got, given in zip(read(made(bits), store, C), (keys, values), strict=True):
        torch.testing.assert_close(got, formula(given, bits), atol=1e-5, rtol=1e-5)


def test_channels_of_outliers_do_not_spoil_a_token() -> None:
    keys = torch.randn(B, H, 64, 64, generator=torch.Generator().manual_seed(0))
    keys[..., 5] *= 100
    store = empty(made(4), 64, 64)
    made(4).write(store, keys, keys, at(range(64)), flags([True] * 64), flags([False] * 64))
    others = [channel for channel in range(64) if channel != 5]
    assert error(made(4).keys(store, slice(0, 64))[..., others], keys[..., others]) < 0.1  # 1: all is lost


def test_a_channel_of_zeros_is_divided_by_one() -> None:
    stage = made()
    keys, values = draw(C, D)
    keys[..., 3] = 0
    store = empty(stage, C, D)
    stage.write(store, keys, torch.zeros_like(values), at(range(C)), flags([True] * C), flags([False] * C))
    assert (store.codes.key_channel_scale[..., 3] == 1).all() and (store.codes.value_channel_scale == 1).all()
    assert not stage.values(store, slice(0, C)).any()


def test_only_active_tokens_fit_the_channels() -> None:
    stage = made()
    keys, values = draw(C, D)
    keys[:, :, 7:] = torch.nan
    some = empty(stage, C, D)
    alone = empty(stage, C, D)
    stage.write(some, keys, values, at(range(C)), flags([slot < 7 for slot in range(C)]), flags([False] * C))
    stage.write(alone, keys[:, :, :7], values[:, :, :7], at(range(7)), flags([True] * 7), flags([False] * C))
    assert stages.same(some, alone)


def test_a_head_without_tokens_is_fitted_anew() -> None:
    stage = made()
    store, _, _ = fill(stage, C, D)
    before = [getattr(store.codes, name).clone() for name in CHANNELS]
    keys, values = draw(4, D, seed=5)
    occupied = torch.ones(B, H, C, dtype=torch.bool)
    occupied[1, 2] = False
    stage.write(store, keys, values, at(range(4)), flags([True] * 4), occupied)
    fresh = torch.zeros(B, H, dtype=torch.bool)
    fresh[1, 2] = True
    for name, then in zip(CHANNELS, before, strict=True):
        assert torch.equal((getattr(store.codes, name) != then).any(-1).squeeze(-1), fresh)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dim", [5, 8, 64, 80, 96, 128, 256])
def test_it_is_a_good_stage(bits: int, dim: int) -> None:
    stages.check_ways_to_read(made(bits), 6, dim)
    stages.check_rows(made(bits), 6, dim)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_slots_are_taken_again(bits: int) -> None:
    stage = made(bits)
    stages.check_inactive(stage, C, D)
    stages.check_finite(stage, C, D)
    store, _, _ = fill(stage, C, D)
    before = stages.copy(store)
    keys, values = draw(1, D, seed=2)
    stage.write(store, keys, values, at([3]), flags([True]), flags([slot != 3 for slot in range(C)]))
    others = [slot for slot in range(C) if slot != 3]
    for now, then in zip(store.codes, before.codes, strict=True):
        assert torch.equal(
            now[:, :, others] if now.shape[2] == C else now, then[:, :, others] if now.shape[2] == C else then
        )
    assert not torch.equal(store.codes.key_zero, before.codes.key_zero)


@pytest.mark.parametrize(("bits", "dim", "per_number"), [(2, 128, 2.25), (4, 128, 4.25), (8, 64, 8.5)])
def test_bytes_are_known_without_memory(bits: int, dim: int, per_number: float) -> None:
    codes = made(bits).alloc(2, 8, 4096, dim, "meta")
    assert all(part.device.type == "meta" for part in codes)
    channels = 2 * 8 * dim * 2 * 2
    assert sum(part.nbytes for part in codes) - channels == 2 * 8 * 4096 * dim * 2 * per_number / 8


@pytest.mark.parametrize(
    "parameters", [{"high": -0.1}, {"high": 1.1}, {"high_bits": 16}, {"bits": 8}, {"recode_every": 0}]
)
def test_it_refuses(parameters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^ZipCache\.{next(iter(parameters))} must be .*, got .*; try .*\.$"):
        ZipCache(**parameters)


def test_nothing_to_write() -> None:
    stage = made()
    store = empty(made(), 0, D)
    stage.write(store, *draw(0, D), at([]), flags([]), flags([]))
    assert stage.keys(store, slice(0, 0)).shape == (B, H, 0, D)


@pytest.mark.full  # tests/engine/test_compile.py compiles a whole step with this codec on every commit
@pytest.mark.filterwarnings("default")  # the compiler warns about itself
def test_it_compiles_whole() -> None:
    stages.check_compiled(made(3), C, D, "aot_eager", torch.testing.assert_close)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_it_compiles_to_kernels() -> None:
    stages.check_compiled(made(2), C, D, "inductor", torch.testing.assert_close)
