"""Codes that are decoded within the loop that sums give what decoding each number gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.kernels import words
from kvpolicy.kernels.fused_elements import decode_levels, mix_levels, score_levels
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
