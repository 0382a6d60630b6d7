"""RotateKV, and the mixing of channels that it shares with TurboQuant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.codecs._rotation import mix, mixing, unmix
from kvpolicy.codecs.rotate import RotateKV
from kvpolicy.protocols import Codec, ModelInfo, Stage
from tests.codecs import stages
from tests.codecs.stages import B, H, at, draw, empty, error, fill, flags, read

C = 12
D = 16
CPU = torch.device("cpu")


def made(bits: Any = 4, group_size: int = 8, **fields: Any) -> RotateKV:
    return RotateKV(bits=bits, group_size=group_size, **fields)


def formula(x: Tensor, bits: int) -> Tensor:
    """A flat group, quantized and back; 0 is always in its range."""
    clip = 0.8 if bits == 2 else 1.0
    top = 2**bits - 1
    low = x.min().clamp(max=0) * clip
    high = x.max().clamp(min=0) * clip
    scale = ((high - low) / top).half().float()
    zero = (-low / scale).round()
    return (((x / scale).round() + zero).clamp(0, top) - zero) * scale


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


def test_it_is_a_codec_and_a_stage() -> None:
    codec = RotateKV(residual_length=32, block_size=32)
    assert isinstance(codec, Codec) and isinstance(codec, Stage) and codec.stages == (codec,)
    traits = codec.traits
    assert (traits.block, traits.group_size, traits.residual, traits.key_space) == (32, 1, 32, "unrotated")
    assert (traits.pins, traits.pinned) == ("massive", 20)
    assert [codec.layout(tokens) for tokens in (83, 84, 1000)] == [(83, ()), (84, (32,)), (84, (948,))]
    codec.check(ModelInfo(1, 1, 7))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codes_of_mixed_and_ordered_channels(bits: int) -> None:
    codec = made(bits)
    store, keys, values = fill(codec, C, D)
    got_keys, got_values = read(codec, store, C)
    mixed = mix(keys), mix(values)
    for b in range(B):
        for h in range(H):
            order = mixed[0][b, h].abs().sum(0).argsort(descending=True)
            assert torch.equal(store.codes.place[b, h, 0].argsort(), order)
            for token in range(C):
                for some in (order[:8], order[8:]):
                    back = formula(mixed[0][b, h, token, some], bits)
                    torch.testing.assert_close(mix(got_keys)[b, h, token, some], back, atol=1e-4, rtol=1e-4)
                for some in (slice(0, 8), slice(8, 16)):
                    back = formula(mixed[1][b, h, token, some], bits)
                    torch.testing.assert_close(mix(got_values)[b, h, token, some], back, atol=1e-5, rtol=1e-4)


def test_one_group_needs_no_order() -> None:
    store, _, _ = fill(made(group_size=16), C, D)
    assert not store.codes.place.any()


def test_mixing_saves_channels_beside_an_outlier() -> None:
    store = empty(made(4, 64), 64, 64)
    keys, values = draw(64, 64)
    values[..., 5] *= 50
    made(4, 64).write(store, keys, values, at(range(64)), flags([True] * 64), flags([False] * 64))
    others = [channel for channel in range(64) if channel != 5]
    assert error(made(4, 64).values(store, slice(0, 64))[..., others], values[..., others]) < 0.6  # 1: all is lost


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("constant", [-3.25, 7.5, 0.0])
def test_a_group_of_equal_numbers_is_exact(bits: int, constant: float) -> None:
    codec = made(bits, 16)
    store = empty(made(bits, 16), C, D)
    mixed = torch.full((B, H, C, D), constant)
    x = unmix(mixed)
    codec.write(store, x, x, at(range(C)), flags([True] * C), flags([False] * C))
    assert all(torch.equal(part, x) for part in read(codec, store, C))


def test_only_active_tokens_order_channels() -> None:
    codec = made()
    keys, values = draw(C, D)
    keys[:, :, 7:] = torch.nan
    some = empty(codec, C, D)
    alone = empty(codec, C, D)
    codec.write(some, keys, values, at(range(C)), flags([slot < 7 for slot in range(C)]), flags([False] * C))
    few = keys[:, :, :7], values[:, :, :7], at(range(7)), flags([True] * 7)
    codec.write(alone, *few, flags([False] * C))
    assert stages.same(some, alone) and some.codes.place.any()


def test_a_head_without_tokens_is_ordered_anew() -> None:
    codec = made()
    store, _, _ = fill(codec, C, D)
    before = store.codes.place.clone()
    keys, values = draw(4, D, seed=5)
    occupied = torch.ones(B, H, C, dtype=torch.bool)
    occupied[1, 2] = False
    codec.write(store, keys, values, at(range(4)), flags([True] * 4), occupied)
    fresh = torch.zeros(B, H, dtype=torch.bool)
    fresh[1, 2] = True
    assert torch.equal((store.codes.place != before).any(-1).squeeze(-1), fresh)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dim", [5, 8, 64, 80, 96, 128, 256])
def test_it_is_a_good_stage(bits: int, dim: int) -> None:
    codec = RotateKV(bits=bits, group_size=32)  # pyright: ignore[reportArgumentType]
    stages.check_ways_to_read(codec, 6, dim)
    stages.check_rows(codec, 6, dim)


@pytest.mark.parametrize("group", [8, 16])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_slots_are_taken_again(bits: int, group: int) -> None:
    codec = made(bits, group)
    stages.check_inactive(codec, C, D)
    stages.check_overwrite(codec, C, D, ("place",))
    stages.check_finite(codec, C, D)


def test_longer_than_a_chunk() -> None:
    stages.check_ways_to_read(made(), 2100, 8)


@pytest.mark.parametrize(("bits", "dim", "per_number"), [(2, 128, 2.1875), (3, 128, 3.1875), (4, 256, 4.1875)])
def test_bytes_are_known_without_memory(bits: int, dim: int, per_number: float) -> None:
    codes = made(bits, 128).alloc(2, 8, 4096, dim, "meta")
    assert all(part.device.type == "meta" for part in codes)
    order = 2 * 8 * dim * 2
    assert sum(part.nbytes for part in codes) - order == 2 * 8 * 4096 * dim * 2 * per_number / 8


@pytest.mark.parametrize(
    "parameters", [{"bits": 5}, {"group_size": 0}, {"sinks": -1}, {"residual_length": -1}, {"block_size": 0}]
)
def test_it_refuses(parameters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^RotateKV\.{next(iter(parameters))} must be .*, got .*; try .*\.$"):
        RotateKV(**parameters)


def test_nothing_to_write() -> None:
    codec = made()
    store = empty(made(), 0, D)
    codec.write(store, *draw(0, D), at([]), flags([]), flags([]))
    assert codec.keys(store, slice(0, 0)).shape == (B, H, 0, D)


@pytest.mark.full  # tests/engine/test_compile.py compiles a whole step with this codec on every commit
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
    stages.check_compiled(made(2), C, 24, "inductor", torch.testing.assert_close)
