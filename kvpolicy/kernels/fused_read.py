"""Attention to codes without decoding them: scales and zeros are folded out of the sums.

A decode step reads every code once. To decode a chunk of slots first writes and reads fp32 numbers that are many times
as large as the codes, so that these functions multiply the unpacked codes elementwise, sum, and scale the sums.

They are written for inductor, which makes one loop over the codes of each of them:

- The codes of each place of a byte or word are products of their own, since joined codes would be written out.
- The query heads of a group are unrolled: as one broadcast, each of them would convert every code again.
- Sums over channels are products and `sum`, not a matrix product, which would be a library call on a decoded tensor.
- Sums over slots are sums of blocks: over more than 4,096 numbers, inductor (torch 2.13) sums with a helper on a CPU
  that takes as long as the rest of the loop.

`B` rows, `H` KV heads, `C` slots, `G` query heads of each KV head, `D` channels, `W` words or bytes of codes; see
`kvpolicy.kernels.words`. Slots that are summed over are `S`: C, or blocks of slots; see `in_blocks`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpolicy.kernels.compiled import apart
from kvpolicy.kernels.words import Place, constant, split

BLOCK = 512
"""Slots of a block."""


def whole_blocks(t: Tensor, dim: int = 2) -> int:
    """Slots in whole blocks; all of them if they fill none, and on a GPU, which has no use for blocks."""
    slots = t.shape[dim]
    return slots - slots % BLOCK if slots >= BLOCK and t.device.type == "cpu" else slots


def in_blocks(t: Tensor, dim: int = 2) -> Tensor:
    """Whole blocks of slots, [..., C, ...] as [..., C / 512, 512, ...]; slots that are in none as they are."""
    if t.shape[dim] < BLOCK or t.device.type != "cpu":
        return t
    return t.narrow(dim, 0, whole_blocks(t, dim)).unflatten(dim, (-1, BLOCK))


def sum_slots(t: Tensor, blocked: bool) -> Tensor:
    """Sums over slots or over blocks of them, [B, H, *S, ...] as [B, H, ...]."""
    return t.sum(3).sum(2) if blocked else t.sum(2)


@apart
def score_channel_groups(
    codes: Tensor, scale: Tensor, zero: Tensor, queries: Tensor, sums: Tensor, bits: int
) -> Tensor:
    """Products of queries with codes that have a scale and a zero for each group of channels of a token.

    Args:
        codes: [B, H, C, W], by `as_words`.
        scale: [B, H, C, groups].
        zero: [B, H, C, groups], or of no group if codes have no zero.
        queries: In the order of places, [B, H, G, D] fp32.
        sums: The queries summed over each group, [B, H, G, groups] fp32.
        bits: Bits per code.

    Returns:
        [B, H, G, C] fp32.
    """
    places = split(codes, bits)
    return score_places(places, [place.codes.float() for place in places], scale, zero, queries, sums)


def score_places(
    places: list[Place], numbers: list[Tensor], scale: Tensor, zero: Tensor, queries: Tensor, sums: Tensor
) -> Tensor:
    """`score_channel_groups`, where the codes at each place stand for `numbers`, [B, H, C, W] fp32 each."""
    runs = _runs(places, constant(queries.shape[-1] // scale.shape[-1]))
    width = len(places[0].channels)
    scores: list[Tensor] = []
    for g in range(queries.shape[2]):
        query = queries[:, :, g, None]
        # Products of places in the same groups are added before they are summed over channels, which is slower.
        products: dict[tuple[int, ...], Tensor] = {}
        for n, (number, groups) in enumerate(zip(numbers, runs, strict=True)):
            own = (number * query[..., n * width : (n + 1) * width]).unflatten(-1, (len(groups), -1))
            products[groups] = products[groups] + own if groups in products else own
        total: Tensor | None = None
        for groups, product in products.items():
            of_runs = product.sum(-1)
            for run, group in enumerate(groups):
                term = of_runs[..., run] * scale[..., group]
                total = term if total is None else total + term
        assert total is not None
        if zero.shape[-1]:
            total = total + (zero * sums[:, :, g, None]).sum(-1)
        scores.append(total)
    return torch.stack(scores, 2)


def _runs(places: list[Place], size: int) -> list[tuple[int, ...]]:
    """The group of each run of neighboring codes at each place; runs are of one length and within one group."""
    channels = places[0].channels
    run = math.gcd(len(channels), size // channels.step)
    return [tuple(channel // size for channel in place.channels[::run]) for place in places]


def decode_channel_groups(codes: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Codes that have a scale and a zero for each group of channels of a token, decoded in one pass.

    Args:
        codes: [B, H, n, D'] uint8.
        scale: [B, H, n, groups] fp32.
        zero: [B, H, n, groups] fp32.
        bits: Bits per code.

    Returns:
        [B, H, n, D] fp32.
    """
    return torch.cat(channel_group_parts(codes, scale, zero, bits), -1)


def channel_group_parts(codes: Tensor, scale: Tensor, zero: Tensor, bits: int) -> list[Tensor]:
    """Numbers that `decode_channel_groups` decodes at each place of the bytes, in order, [B, H, n, W] each."""
    size = constant(codes.shape[-1] * 8 // bits // scale.shape[-1])
    decoded: list[Tensor] = []
    for place in split(codes, bits):
        group = [channel // size for channel in place.channels]
        decoded.append(place.codes.float() * _spread(scale, group) + _spread(zero, group))
    return decoded


def _spread(t: Tensor, group: list[int]) -> Tensor:
    """The numbers [..., groups] of the group of each channel, [..., W], or [..., 1] if it is the same one."""
    numbers = sorted({*group})
    if len(numbers) == 1:
        return t[..., numbers[0], None]
    return torch.cat([t[..., number, None].expand(*t.shape[:-1], group.count(number)) for number in numbers], -1)


@apart
def score_token_groups(codes: Tensor, scale: Tensor, offsets: Tensor, queries: Tensor, bits: int) -> Tensor:
    """Products of queries with codes that have a scale and a zero for each channel of a group of tokens.

    Args:
        codes: [B, H, C, W], by `as_words`.
        scale: In the order of places, [B, H, C / size, D].
        offsets: Products of the queries with the zeros, [B, H, G, C / size] fp32.
        queries: In the order of places, [B, H, G, D] fp32.
        bits: Bits per code.

    Returns:
        [B, H, G, C] fp32.
    """
    groups = scale.shape[2]
    numbers = [place.codes.float().unflatten(2, (groups, -1)) for place in split(codes, bits)]
    width = numbers[0].shape[-1]
    scores: list[Tensor] = []
    for g in range(queries.shape[2]):
        scaled = (scale * queries[:, :, g, None])[:, :, :, None]
        products = [number * scaled[..., n * width : (n + 1) * width] for n, number in enumerate(numbers)]
        # Added before they are summed over channels, which is slower.
        scores.append((sum(products[1:], products[0]).sum(-1) + offsets[:, :, g, :, None]).flatten(2))
    return torch.stack(scores, 2)


@apart
def mix_channel_groups(codes: Tensor, scale: Tensor, zero: Tensor, weights: Tensor, bits: int) -> Tensor:
    """Weighted sums of codes that have a scale and a zero for each group of channels of a token.

    Args:
        codes: [B, H, *S, W], by `as_words`.
        scale: [B, H, *S, groups].
        zero: [B, H, *S, groups], or of no group if codes have no zero.
        weights: [B, H, G, *S] fp32.
        bits: Bits per code.

    Returns:
        In the order of places, [B, H, G, D] fp32.
    """
    places = split(codes, bits)
    return mix_places(places, [place.codes.float() for place in places], scale, zero, weights)


def mix_places(places: list[Place], numbers: list[Tensor], scale: Tensor, zero: Tensor, weights: Tensor) -> Tensor:
    """`mix_channel_groups`, where the codes at each place stand for `numbers`, [B, H, *S, W] fp32 each."""
    size = sum(len(place.channels) for place in places) // constant(scale.shape[-1])
    runs = _runs(places, size)
    blocked = numbers[0].dim() > 4
    numbers = [number.unflatten(-1, (len(groups), -1)) for number, groups in zip(numbers, runs, strict=True)]
    mixed: list[Tensor] = []
    for g in range(weights.shape[2]):
        own = weights[:, :, g, ..., None]
        scaled = own * scale
        sums = [
            sum_slots(number * _of_runs(scaled, groups)[..., None], blocked).flatten(2)
            for number, groups in zip(numbers, runs, strict=True)
        ]
        if zero.shape[-1]:
            offset = sum_slots(own * zero, blocked)
            groups = [[channel // size for channel in place.channels] for place in places]
            sums = [each + _spread(offset, group) for each, group in zip(sums, groups, strict=True)]
        mixed += sums
    return torch.cat(mixed, -1).unflatten(-1, (weights.shape[2], -1))


def _of_runs(t: Tensor, groups: tuple[int, ...]) -> Tensor:
    """The numbers [..., groups] of the group of each run, [..., runs], or [..., 1] if it is the same one."""
    if len({*groups}) == 1:
        return t[..., groups[0], None]
    if len({*groups}) == len(groups):
        return t[..., groups[0] : groups[-1] + 1]
    return torch.stack([t[..., group] for group in groups], -1)  # several runs of some groups
