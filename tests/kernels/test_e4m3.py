"""Numbers of e4m3: those of torch, decoded in memory and in the registers of a loop."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.kernels import compiled
from kvpolicy.kernels.compiled import call
from kvpolicy.kernels.fused_elements import (
    _in_registers,  # pyright: ignore[reportPrivateUsage]
    from_e4m3,
    mix_e4m3,
    score_e4m3,
    to_e4m3,
)
from kvpolicy.kernels.words import as_words, in_order_of_channels, in_order_of_places

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
