"""Sums over codes are those over what the codes decode to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvpolicy.codecs.uniform import dequantize, largest_divisor, quantize
from kvpolicy.kernels import words
from kvpolicy.kernels.fused_read import (
    BLOCK,
    in_blocks,
    mix_channel_groups,
    score_channel_groups,
    score_token_groups,
    sum_slots,
    whole_blocks,
)
from kvpolicy.kernels.packing import fills_bytes, pack, unpack_float
from kvpolicy.kernels.words import in_order_of_channels, in_order_of_places
from tests.sampling import product

B = 2
H = 3
C = 24
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


@pytest.fixture(params=["bytes", "words"])
def as_read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """`as_words` of vectors of one word, or codes as they are."""
    monkeypatch.setattr(words, "VECTOR", 1)
    return words.as_words if request.param == "words" else lambda codes, *given: codes


@pytest.mark.parametrize("width", [2, 6, 8, 12, 20, 40])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
def test_places_are_what_is_unpacked(bits: int, width: int, as_read: Callable[..., Tensor]) -> None:
    codes = torch.randint(0, 2**bits, (3, width), generator=torch.Generator().manual_seed(bits))
    packed = pack(codes, bits)
    if not fills_bytes(packed, bits, width):
        assert any(width * part % 8 for part in (1, 2, 4) if bits & part)
        return
    read = as_read(packed, bits)
    places = words.split(read, bits)
    for place in places:
        assert torch.equal(place.codes.float(), codes[:, place.channels].float())
    assert torch.equal(
        torch.cat([place.codes.float() for place in places], -1), in_order_of_places(codes.float(), read)
    )
    assert torch.equal(in_order_of_channels(in_order_of_places(codes, read), read), codes)


@pytest.mark.parametrize(
    ("width", "bits", "size", "sums_slots", "wide", "is_read"),
    [
        (128, 4, 128, False, False, True),
        (128, 4, 32, True, False, True),
        (128, 4, 64, True, True, True),
        (128, 4, 32, True, True, False),  # the words of a group fill half of a vector
        (128, 4, 32, False, True, False),
        (128, 4, None, True, True, True),  # no scale per group of channels
        (128, 3, 32, False, False, False),
        (128, 4, 2, False, False, False),  # a word has codes of more than one group
        (80, 4, 80, False, False, True),
        (80, 4, 80, True, False, False),  # 10 words fill no vectors
        (64, 4, 64, True, False, True),
        (64, 4, 64, False, True, False),
        (4, 4, 4, False, False, False),  # 2 bytes
    ],
)
def test_which_codes_are_read_as_words(
    width: int,
    bits: int,
    size: int | None,
    sums_slots: bool,
    wide: bool,
    is_read: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(words, "HAS_WIDE_VECTORS", wide)
    monkeypatch.setattr(words, "VECTOR", 16 if wide else 8)
    codes = torch.zeros(1, 2, 3, width * bits // 8, dtype=torch.uint8)
    assert (words.as_words(codes, bits, size, sums_slots).dtype == torch.float32) == is_read


def test_codes_that_are_not_contiguous_are_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "VECTOR", 1)
    codes = torch.zeros(1, 2, 3, 9, dtype=torch.uint8)
    assert words.as_words(codes[..., :8], 4).dtype == torch.uint8
    assert words.as_words(codes[:, :, :, 1:].mT.contiguous().mT, 4).dtype == torch.uint8


@pytest.mark.parametrize("slots", [1, 511, 512, 513, 1500])
def test_blocks_are_whole(slots: int) -> None:
    t = torch.arange(2 * slots).view(1, 2, slots)
    whole = whole_blocks(t)
    blocked = in_blocks(t)
    assert in_blocks(t.to("meta")).shape == t.shape and whole_blocks(t.to("meta")) == slots
    assert 0 <= slots - whole < BLOCK and (whole == slots or slots > BLOCK)
    assert torch.equal(blocked.flatten(2), t[..., :whole])
    assert torch.equal(sum_slots(blocked.float(), blocked.dim() > 3), t[..., :whole].float().sum(2))


@product("width,bits,group,kind", WIDTHS, [2, 3, 4, 8], [1, 3], ["normal", "outliers", "one token", "equal"])
def test_groups_of_channels(
    width: tuple[int, int], bits: int, group: int, kind: str, as_read: Callable[..., Tensor]
) -> None:
    dim, most = width
    size = largest_divisor(dim, most)
    codes, scale, zero = quantize(draw(kind, B, H, C, dim), bits, size)
    queries = draw("normal", B, H, group, dim)
    read = as_read(codes, bits, size)
    ordered = in_order_of_places(queries, read)
    for has_zero in (True, False):
        zero = zero if has_zero else torch.zeros_like(zero)
        decoded = dequantize(codes, scale, zero, bits, dim)
        bounds = scale.float(), zero.float()[..., : None if has_zero else 0]
        sums = queries.unflatten(-1, (-1, size)).sum(-1)
        close(score_channel_groups(read, *bounds, ordered, sums, bits), queries @ decoded.mT)
        for weights in (draw("normal", B, H, group, C).softmax(-1), torch.zeros(B, H, group, C)):
            found = mix_channel_groups(read, *bounds, weights, bits)
            close(in_order_of_channels(found, read), weights @ decoded)
            slots, scales, zeros = (t.unflatten(2, (4, -1)) for t in (read, *bounds))
            found = mix_channel_groups(slots, scales, zeros, weights.unflatten(3, (4, -1)), bits)
            close(in_order_of_channels(found, read), weights @ decoded)


@product("dim,bits,group,size", [16, 80], [2, 3, 4, 8], [1, 3], [1, 4, C])
def test_groups_of_tokens(dim: int, bits: int, group: int, size: int, as_read: Callable[..., Tensor]) -> None:
    codes = torch.randint(0, 2**bits, (B, H, C, dim), generator=torch.Generator().manual_seed(bits))
    scale = draw("outliers", B, H, C // size, dim).half().float()
    zero = draw("normal", B, H, C // size, dim).half().float()
    packed = pack(codes, bits)
    grouped = unpack_float(packed, bits, dim).unflatten(2, (-1, size))
    decoded = (grouped * scale[:, :, :, None] + zero[:, :, :, None]).flatten(2, 3)
    queries = draw("normal", B, H, group, dim)
    read = as_read(packed, bits)
    ordered = in_order_of_places(scale, read), queries @ zero.mT, in_order_of_places(queries, read)
    close(score_token_groups(read, *ordered, bits), queries @ decoded.mT)
