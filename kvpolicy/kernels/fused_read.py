"""Attention to codes without decoding them: scales and zeros are folded out of the sums.

A decode step reads every code once. To decode a chunk of slots first writes and reads fp32 numbers that are many times
as large as the codes, so that these functions multiply the unpacked codes elementwise, sum, and scale the sums.

They are written for inductor, which makes one loop over the bytes of each of them:

- The codes of each place of a byte are products of their own, since joined bytes would be written out.
- The query heads of a group are unrolled: as one broadcast, each of them would convert every byte again.
- Sums over channels are products and `sum`, not a matrix product, which would be a library call on a decoded tensor.
- Scales and zeros come in fp32: on a CPU, inductor (torch 2.13) converts fp16 so slowly that it takes most of the time.

`B` rows, `H` KV heads, `C` slots, `G` query heads of each KV head, `D` channels, `D'` = D * bits / 8 bytes of codes.
See `kvpolicy.kernels.packing.pack` for the order of codes in bytes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpolicy.kernels.packing import unpack_places


def places(codes: Tensor, bits: int) -> list[Tensor]:
    """`kvpolicy.kernels.packing.unpack_places` in fp32."""
    return [code.float() for code in unpack_places(codes, bits)]


def score_channel_groups(codes: Tensor, scale: Tensor, zero: Tensor, queries: Tensor, bits: int) -> Tensor:
    """Products of queries with codes that have a scale and a zero for each group of channels of a token.

    Args:
        codes: [B, H, C, D'] uint8.
        scale: [B, H, C, groups] fp32.
        zero: [B, H, C, groups] fp32, or of no group if codes have no zero.
        queries: [B, H, G, D] fp32.
        bits: Bits per code.

    Returns:
        [B, H, G, C] fp32.
    """
    groups = scale.shape[-1]
    size = queries.shape[-1] // groups
    parts = places(codes, bits)
    width = parts[0].shape[-1]
    run = math.gcd(width, size)  # neighboring channels of a part that are in one group
    scores: list[Tensor] = []
    for g in range(queries.shape[2]):
        query = queries[:, :, g, None]
        # Products of parts in the same groups are added before they are summed over channels, which is slower.
        products: dict[tuple[int, ...], Tensor] = {}
        for place, part in enumerate(parts):
            group = tuple((place * width + first) // size for first in range(0, width, run))
            own = (part * query[..., place * width : (place + 1) * width]).unflatten(-1, (-1, run))
            products[group] = products[group] + own if group in products else own
        total: Tensor | None = None
        for group, product in products.items():
            sums = product.sum(-1)
            for number, each in enumerate(group):
                term = sums[..., number] * scale[..., each]
                total = term if total is None else total + term
        assert total is not None
        if zero.shape[-1]:
            total = total + (zero * query.unflatten(-1, (groups, size)).sum(-1)).sum(-1)
        scores.append(total)
    return torch.stack(scores, 2)


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
    """What `decode_channel_groups` decodes at each place of the bytes, the first channels first, [B, H, n, W] each."""
    size = codes.shape[-1] * 8 // bits // scale.shape[-1]
    decoded: list[Tensor] = []
    first = 0
    for part in places(codes, bits):
        group = [channel // size for channel in range(first, first + part.shape[-1])]
        decoded.append(part * _spread(scale, group) + _spread(zero, group))
        first += part.shape[-1]
    return decoded


def _spread(t: Tensor, group: list[int]) -> Tensor:
    """The numbers [..., groups] of the group of each channel, [..., W], or [..., 1] if it is the same one."""
    numbers = sorted({*group})
    if len(numbers) == 1:
        return t[..., numbers[0], None]
    return torch.cat([t[..., number, None].expand(*t.shape[:-1], group.count(number)) for number in numbers], -1)


def score_token_groups(codes: Tensor, scale: Tensor, zero: Tensor, queries: Tensor, bits: int) -> Tensor:
    """Products of queries with codes that have a scale and a zero for each channel of a group of tokens.

    Args:
        codes: [B, H, C, D'] uint8.
        scale: [B, H, C / size, D] fp32.
        zero: [B, H, C / size, D] fp32.
        queries: [B, H, G, D] fp32.
        bits: Bits per code.

    Returns:
        [B, H, G, C] fp32.
    """
    groups = scale.shape[2]
    parts = [part.unflatten(2, (groups, -1)) for part in places(codes, bits)]
    width = parts[0].shape[-1]
    scores: list[Tensor] = []
    for g in range(queries.shape[2]):
        query = queries[:, :, g, None]
        scaled = (scale * query)[:, :, :, None]
        products = [part * scaled[..., n * width : (n + 1) * width] for n, part in enumerate(parts)]
        # Added before they are summed over channels, which is slower.
        scores.append((sum(products[1:], products[0]).sum(-1) + (zero * query).sum(-1)[..., None]).flatten(2))
    return torch.stack(scores, 2)


def mix_channel_groups(codes: Tensor, scale: Tensor, zero: Tensor, weights: Tensor, bits: int) -> Tensor:
    """Weighted sums of codes that have a scale and a zero for each group of channels of a token.

    Args:
        codes: [B, H, C, D'] uint8.
        scale: [B, H, C, groups] fp32.
        zero: [B, H, C, groups] fp32, or of no group if codes have no zero.
        weights: [B, H, G, C] fp32.
        bits: Bits per code.

    Returns:
        [B, H, G, D] fp32.
    """
    groups = scale.shape[-1]
    size = codes.shape[-1] * 8 // bits // groups
    parts = places(codes, bits)
    width = parts[0].shape[-1]
    run = math.gcd(width, size)
    parts = [part.unflatten(-1, (-1, run)) for part in parts]
    mixed: list[Tensor] = []
    for g in range(weights.shape[2]):
        own = weights[:, :, g, :, None]
        scaled = own * scale
        sums: list[Tensor] = []
        for place, part in enumerate(parts):
            group = [(place * width + first) // size for first in range(0, width, run)]
            if len({*group}) == 1:
                each = scaled[..., group[0], None]
            elif len({*group}) == len(group):
                each = scaled[..., group[0] : group[-1] + 1]
            else:  # several runs of a group, and of some groups more than of others
                each = torch.stack([scaled[..., number] for number in group], -1)
            sums.append((part * each[..., None]).sum(2).flatten(2))
        out = torch.cat(sums, -1)
        if zero.shape[-1]:
            out = out + (own * zero).sum(2).repeat_interleave(size, -1)
        mixed.append(out)
    return torch.stack(mixed, 2)
