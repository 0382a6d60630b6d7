"""Sums over codes are those over what the codes decode to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.codecs._uniform import dequantize, largest_divisor, quantize
from kvpolicy.kernels.fused_read import mix_channel_groups, places, score_channel_groups, score_token_groups
from kvpolicy.kernels.packing import fills_bytes, pack, unpack_float

B, H, C = 2, 3, 24
WIDTHS = [(16, 16), (16, 4), (64, 32), (80, 32), (80, 8), (96, 32), (128, 128)]
"""Channels, and the most channels of a group; groups may be larger or smaller than what a place of the bytes holds."""


def draw(kind: str, *shape: int) -> Tensor:
    """Numbers of one kind."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1]))
    if kind == "outliers":
        numbers[..., 0] *= 1000
    if kind == "one token":
        numbers[:, :, 1:] = 0
    return torch.ones_like(numbers) if kind == "equal" else numbers


def close(found: Tensor, wanted: Tensor) -> None:
    """To 1e-5 of the largest number."""
    assert found.shape == wanted.shape and found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max().clamp_min(1e-6)))


@pytest.mark.parametrize("width", [2, 4, 6, 8, 12, 16, 20, 40])
@pytest.mark.parametrize("bits", range(1, 9))
def test_places_are_what_is_unpacked(bits: int, width: int) -> None:
    codes = torch.randint(0, 2**bits, (3, width), generator=torch.Generator().manual_seed(bits))
    packed = pack(codes, bits)
    if not fills_bytes(packed, bits, width):
        assert any(width * part % 8 for part in (1, 2, 4) if bits & part)
        return
    assert torch.equal(torch.cat(places(packed, bits), -1), codes.float())


@pytest.mark.parametrize("kind", ["normal", "outliers", "one token", "equal"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("dim", "most"), WIDTHS)
def test_groups_of_channels(dim: int, most: int, bits: int, group: int, kind: str) -> None:
    size = largest_divisor(dim, most)
    codes, scale, zero = quantize(draw(kind, B, H, C, dim), bits, size)
    decoded = dequantize(codes, scale, zero, bits, dim)
    queries = draw("normal", B, H, group, dim)
    bounds = scale.float(), zero.float()
    close(score_channel_groups(codes, *bounds, queries, bits), queries @ decoded.mT)
    for weights in (draw("normal", B, H, group, C).softmax(-1), torch.zeros(B, H, group, C)):
        close(mix_channel_groups(codes, *bounds, weights, bits), weights @ decoded)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_without_a_zero(bits: int) -> None:
    codes, scale, zero = quantize(draw("normal", B, H, C, 16), bits, 4)
    decoded = dequantize(codes, scale, torch.zeros_like(zero), bits, 16)
    queries = draw("normal", B, H, 2, 16)
    weights = draw("normal", B, H, 2, C).softmax(-1)
    none = zero.float()[..., :0]
    close(score_channel_groups(codes, scale.float(), none, queries, bits), queries @ decoded.mT)
    close(mix_channel_groups(codes, scale.float(), none, weights, bits), weights @ decoded)


@pytest.mark.parametrize("size", [1, 4, C])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dim", [16, 80])
def test_groups_of_tokens(dim: int, bits: int, group: int, size: int) -> None:
    codes = torch.randint(0, 2**bits, (B, H, C, dim), generator=torch.Generator().manual_seed(bits))
    scale = draw("outliers", B, H, C // size, dim).half().float()
    zero = draw("normal", B, H, C // size, dim).half().float()
    packed = pack(codes, bits)
    grouped = unpack_float(packed, bits, dim).unflatten(2, (-1, size))
    decoded = (grouped * scale[:, :, :, None] + zero[:, :, :, None]).flatten(2, 3)
    queries = draw("normal", B, H, group, dim)
    close(score_token_groups(packed, scale, zero, queries, bits), queries @ decoded.mT)
