"""Attention to codes that are decoded in registers, to vectors of fp16, and to fp8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.kernels import compiled, words
from kvpolicy.kernels.compiled import call
from kvpolicy.kernels.fused_elements import (
    _in_registers,  # pyright: ignore[reportPrivateUsage]
    decode_levels,
    from_e4m3,
    is_read_whole,
    mix_e4m3,
    mix_half,
    mix_levels,
    score_e4m3,
    score_half,
    score_levels,
    to_e4m3,
)
from kvpolicy.kernels.packing import pack
from kvpolicy.kernels.products import rotate_halves
from kvpolicy.kernels.words import as_words, in_order_of_channels, in_order_of_places
from tests.sampling import product

B = 2
H = 3
C = 24
D = 16


def decode_by_number(
    codes: Tensor, levels: Tensor, scale: Tensor, zero: Tensor, channels: Tensor, outliers: Tensor
) -> Tensor:
    """Every number by itself, in Python."""
    out = levels.flatten()[codes.long()] * scale + zero
    for row in range(B):
        for head in range(H):
            for slot in range(C):
                for channel, outlier in zip(channels[row, head, slot], outliers[row, head, slot], strict=True):
                    out[row, head, slot, int(channel)] = outlier
    return out


@product("bits,by,outliers", [1, 2, 3, 4], ["token", "channel"], [0, 1, 3, D])
def test_levels(bits: int, by: str, outliers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "VECTOR", 1)
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (B, H, C, D), generator=generator)
    levels = torch.randn(1, 1, 2**bits, generator=generator)
    shape = (B, H, C, 1) if by == "token" else (1, H, 1, D)
    scale, zero = (torch.randn(shape, generator=generator) for _ in range(2))
    channels = torch.rand(B, H, C, D, generator=generator).argsort(-1)[..., :outliers]
    extreme = 100 * torch.randn(B, H, C, outliers, generator=generator)
    wanted = decode_by_number(codes, levels, scale, zero, channels, extreme)
    given = pack(codes, bits), levels, scale, zero, channels.float(), extreme
    assert torch.equal(decode_levels(*given, bits=bits), wanted)
    weights = torch.rand(B, H, 2, C, generator=generator)
    queries = torch.randn(B, H, 2, D, generator=generator)
    of_levels = levels.flatten()[codes]
    for read in {as_words(given[0], bits), given[0]}:
        mixed = mix_levels(read, *given[1:], weights, bits=bits)
        torch.testing.assert_close(in_order_of_channels(mixed, read), weights @ wanted, rtol=1e-5, atol=1e-3)
        scores = score_levels(read, levels, in_order_of_places(queries, read), bits)
        torch.testing.assert_close(scores, queries @ of_levels.mT)
    if by == "token":
        slots, *bounds, at, numbers = (t.unflatten(2, (3, -1)) for t in (given[0], *given[2:]))
        mixed = mix_levels(slots, levels, bounds[0], bounds[1], at, numbers, weights.unflatten(3, (3, -1)), bits)
        torch.testing.assert_close(mixed, weights @ wanted, rtol=1e-5, atol=1e-3)


def test_a_rotation_turns_each_pair_of_channels() -> None:
    keys = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[[0, 5, 7], [2, 1, 900]]])
    rotated = rotate_halves(keys, positions, torch.tensor([1.0, 0.25])[None, None, None])
    for head in range(2):
        for slot in range(3):
            for pair, frequency in enumerate((1.0, 0.25)):
                angle = torch.tensor(float(positions[0, head, slot]) * frequency)
                wanted = complex(*keys[0, head, slot, pair::2]) * complex(float(angle.cos()), float(angle.sin()))
                found = complex(*rotated[0, head, slot, pair::2])
                assert abs(found - wanted) < 1e-5


@pytest.mark.parametrize("width", [2, 6, 7])
def test_products(width: int) -> None:
    vectors = torch.randn(2, 3, 40, width, generator=torch.Generator().manual_seed(width)).half()
    queries = torch.randn(2, 3, 4, width)
    weights = torch.rand(2, 3, 4, 40)
    torch.testing.assert_close(score_half(vectors, queries), queries @ vectors.float().mT)
    torch.testing.assert_close(mix_half(vectors, weights), weights @ vectors.float())


def test_every_number_is_converted_exactly() -> None:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    vectors = numbers[numbers.isfinite()].reshape(1, 1, -1, 64)
    assert torch.equal(score_half(vectors, torch.eye(64)[None, None])[0, 0].mT, vectors[0, 0].float())


def test_a_cpu_converts_some_vectors_at_a_time() -> None:
    """However many there are."""
    assert not is_read_whole(torch.empty(1, 1, 100_000, 2, dtype=torch.float16))


EVERY = torch.arange(256, dtype=torch.uint8)
NUMBERS = EVERY.view(torch.float8_e4m3fn).float()
FINITE = ~NUMBERS.isnan()


def test_numbers_are_those_of_torch() -> None:
    assert torch.equal(from_e4m3(EVERY)[FINITE], NUMBERS[FINITE])
    for codes in (EVERY, EVERY.int()):
        assert torch.equal(_in_registers(codes)[FINITE], NUMBERS[FINITE])
    is_coded = FINITE & (EVERY != 128)  # -0
    assert torch.equal(to_e4m3(NUMBERS[is_coded]), EVERY[is_coded])


def test_rounding_is_that_of_torch() -> None:
    ordered = NUMBERS[FINITE].unique()
    between = (ordered[1:] + ordered[:-1]) / 2
    near = torch.cat([ordered, between, between.nextafter(ordered[1:]), between.nextafter(ordered[:-1])])
    assert torch.equal(from_e4m3(to_e4m3(near)), near.to(torch.float8_e4m3fn).float())
    assert from_e4m3(to_e4m3(torch.tensor([1e9, -1e9]))).tolist() == [448, -448]


@pytest.mark.skipif(bool(compiled._missing_compiler("cpu")), reason="a compiler is needed")
@pytest.mark.slow
@pytest.mark.parametrize("flushed", [False, True])
def test_a_compiled_loop_reads_every_number(flushed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the subnormal ones, where the processor flushes those of fp32 to 0."""
    monkeypatch.setattr(compiled, "_failures", [])
    codes = EVERY[FINITE][torch.randperm(254, generator=torch.Generator().manual_seed(0))].repeat(9)
    codes = codes[: 17 * 128].view(1, 1, 17, 128)
    scale = torch.ones(1, 1, 17, 1)
    words = as_words(codes, 8, 128, sums_slots=True)
    one_slot = torch.eye(17)[None, None]
    one_channel = torch.eye(128)[None, None]
    torch.set_flush_denormal(flushed)
    try:
        scores = call(score_e4m3, words, scale, in_order_of_places(one_channel[:, :, 40:48], words))
        mixed = in_order_of_channels(call(mix_e4m3, words, scale, one_slot[:, :, :4]), words)
    finally:
        torch.set_flush_denormal(False)
    wanted = NUMBERS[codes.long()]
    assert torch.equal(scores, wanted[..., 40:48].mT)
    assert torch.equal(mixed, wanted[:, :, :4])
    assert not compiled._failures
