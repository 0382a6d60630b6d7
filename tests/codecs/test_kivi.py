"""KIVI: its formula, groups that are written to again, and compilation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from kvpolicy.codecs.kivi import KIVI, KIVICodes
from kvpolicy.protocols import Codec, ModelInfo, Stage, StageStore
from tests.codecs import stages

B = 2
H = 3
D = 16
G = 4


def formula(x: Tensor, bits: int) -> Tensor:
    """One group, quantized and back, as KIVI's Algorithm 1 has it; `x` is flat."""
    zero = x.min().half().float()
    scale = ((x.max() - x.min()) / (2**bits - 1)).half().float()
    if scale == 0:
        return zero.expand_as(x)
    return ((x - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero


def made(bits: int, coded: int = 12, **fields: int) -> tuple[KIVI, KIVICodes]:
    kivi = KIVI(bits=bits, group_size=G, **fields)  # pyright: ignore[reportArgumentType]
    return kivi, kivi.alloc(B, H, coded, D, "cpu")


def read(kivi: KIVI, codes: KIVICodes) -> tuple[Tensor, Tensor]:
    return stages.read(kivi, StageStore(codes), codes.keys.shape[2])


def tokens(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(B, H, count, D, generator=generator) * torch.linspace(0.1, 20, D) + torch.linspace(-9, 9, D)
    return keys, torch.randn(B, H, count, D, generator=generator)


def at(*slots: int) -> Tensor:
    return torch.tensor(slots).expand(B, H, -1)


def flags(*values: bool) -> Tensor:
    return torch.tensor(values).expand(B, H, -1)


def write_all(kivi: KIVI, codes: KIVICodes, keys: Tensor, values: Tensor) -> None:
    count = keys.shape[2]
    occupied = torch.zeros(B, H, codes.keys.shape[2], dtype=torch.bool)
    kivi.write(StageStore(codes), keys, values, at(*range(count)), torch.ones(B, H, count, dtype=torch.bool), occupied)


def copy(codes: KIVICodes) -> KIVICodes:
    return KIVICodes(*(part.clone() for part in codes))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_by_channel_and_values_by_token(bits: int, dtype: torch.dtype) -> None:
    kivi, codes = made(bits)
    keys, values = (x.to(dtype) for x in tokens(12))
    write_all(kivi, codes, keys, values)
    got_keys, got_values = read(kivi, codes)
    for b in range(B):
        for h in range(H):
            for first in range(0, 12, G):
                for channel in range(D):
                    group = keys[b, h, first : first + G, channel].float()
                    assert torch.equal(got_keys[b, h, first : first + G, channel], formula(group, bits))
            for token in range(12):
                for first in range(0, D, G):
                    group = values[b, h, token, first : first + G].float()
                    assert torch.equal(got_values[b, h, token, first : first + G], formula(group, bits))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_group_of_equal_numbers_is_exact(bits: int) -> None:
    kivi, codes = made(bits)
    constant = torch.full((B, H, 12, D), -3.25)
    write_all(kivi, codes, constant, constant)
    assert all(torch.equal(part, constant) for part in read(kivi, codes))


def test_a_group_with_an_occupied_slot_keeps_its_scales() -> None:
    kivi, codes = made(2)
    keys, values = tokens(12)
    write_all(kivi, codes, keys, values)
    before = copy(codes)
    new_keys, new_values = tokens(1, seed=2)
    new_keys *= 100
    occupied = torch.ones(B, H, 12, dtype=torch.bool)
    occupied[:, :, 4:7] = False  # slot 7 lives on
    kivi.write(StageStore(codes), new_keys, new_values, at(6), flags(True), occupied)
    assert torch.equal(codes.key_scale, before.key_scale) and torch.equal(codes.key_zero, before.key_zero)
    scale = before.key_scale[:, :, 1].float()
    zero = before.key_zero[:, :, 1].float()
    clipped = ((new_keys[:, :, 0] - zero) / scale).round().clamp(0, 3) * scale + zero
    got_keys, got_values = read(kivi, codes)
    torch.testing.assert_close(got_keys[:, :, 6], clipped)
    assert torch.equal(got_keys[:, :, 7], read(kivi, before)[0][:, :, 7])
    fresh = kivi.alloc(B, H, 12, D, "cpu")
    write_all(kivi, fresh, new_keys, new_values)
    assert torch.equal(got_values[:, :, 6], read(kivi, fresh)[1][:, :, 0]), "values have scales of their own"


def test_an_empty_group_is_fitted_to_the_tokens_written() -> None:
    kivi, codes = made(4)
    write_all(kivi, codes, *tokens(12))
    keys, values = tokens(4, seed=3)
    occupied = torch.ones(B, H, 12, dtype=torch.bool)
    occupied[:, :, 4:8] = False
    kivi.write(StageStore(codes), keys, values, at(7, 4, 5, 6), flags(True, True, True, False), occupied)
    got, _ = read(kivi, codes)
    for channel in range(D):
        assert torch.equal(got[0, 0, [7, 4, 5], channel], formula(keys[0, 0, :3, channel], 4))


def test_one_write_to_empty_and_occupied_groups() -> None:
    kivi, codes = made(4)
    write_all(kivi, codes, *tokens(12))
    before = copy(codes)
    keys, values = tokens(4, seed=4)
    occupied = torch.ones(B, H, 12, dtype=torch.bool)
    occupied[:, :, 0] = occupied[:, :, 8:] = False
    kivi.write(StageStore(codes), keys, values, at(8, 0, 9, 10), flags(*[True] * 4), occupied)
    assert torch.equal(codes.key_scale[:, :, :2], before.key_scale[:, :, :2])
    zero = keys[:, :, [0, 2, 3]].amin(2).half()
    assert torch.equal(codes.key_zero[:, :, 2], zero)


@pytest.mark.parametrize(
    ("tokens_", "exact", "coded"), [(0, 0, ()), (128, 128, ()), (159, 159, ()), (160, 160, (32,)), (1000, 160, (896,))]
)
def test_layout(tokens_: int, exact: int, coded: tuple[int, ...]) -> None:
    kivi = KIVI(residual_length=128)
    assert kivi.layout(tokens_) == (exact, coded)
    assert (kivi.traits.block, kivi.traits.group_size, kivi.traits.residual) == (32, 32, 128)
    assert isinstance(kivi, Codec) and isinstance(kivi, Stage) and kivi.stages == (kivi,)


def test_values_are_grouped_by_the_largest_divisor() -> None:
    assert KIVI(group_size=32).alloc(1, 1, 32, 80, "cpu").value_scale.shape == (1, 1, 32, 4)  # 20 channels each
    assert KIVI(group_size=32).alloc(1, 1, 32, 8, "cpu").value_scale.shape == (1, 1, 32, 1)
    kivi = KIVI(bits=8, group_size=3)
    codes = kivi.alloc(1, 1, 3, 5, "cpu")  # 5 is prime: one channel a group
    x = torch.randn(1, 1, 3, 5)
    yes = torch.ones(1, 1, 3, dtype=torch.bool)
    kivi.write(StageStore(codes), x, x, torch.arange(3)[None, None], yes, ~yes)
    torch.testing.assert_close(read(kivi, codes)[1], x, atol=2e-3, rtol=1e-3)


def test_head_dimension_must_fill_bytes() -> None:
    KIVI(bits=8).check(ModelInfo(1, 1, 5))
    KIVI(bits=2).check(ModelInfo(1, 1, 12))
    with pytest.raises(ValueError, match=r"multiple of 4 for KIVI\.bits=2, got 10; try bits=8"):
        KIVI(bits=2).check(ModelInfo(1, 1, 10))


@pytest.mark.filterwarnings("default")  # the compiler warns about itself
def test_it_compiles_whole_and_once() -> None:
    kivi, eager = made(2)
    compiled = copy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    flush = torch.compile(kivi.write, fullgraph=True, backend=counter)
    occupied = torch.zeros(B, H, 12, dtype=torch.bool)
    for step in range(4):
        keys, values = tokens(4, seed=step)
        write_mask = flags(*[step != 2] * 4).clone()
        slots = at(*range(4)) + 4 * (step % 3)
        kivi.write(StageStore(eager), keys, values, slots, write_mask, occupied)
        flush(StageStore(compiled), keys, values, slots, write_mask, occupied)
        assert all(map(torch.equal, eager, compiled))
    assert counter.frame_count == 1
