"""Groups of tokens, each channel of which has a scale and a zero: how KIVI stores keys."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.codecs.blocks import Blocks, blocks_of
from kvpolicy.codecs.common import put, take, to_groups
from kvpolicy.codecs.uniform import encode, scale_and_zero
from kvpolicy.kernels.compiled import call, is_compiled, widen
from kvpolicy.kernels.fused_read import score_token_groups
from kvpolicy.kernels.packing import pack, unpack_float
from kvpolicy.kernels.products import products
from kvpolicy.kernels.slot_writes import gather_slots
from kvpolicy.kernels.words import as_words, in_order_of_places
from kvpolicy.protocols import At

Parts = tuple[Tensor, Tensor, Tensor]
"""Codes [B, H, C, D'] uint8, and the scale and the zero of each channel of a group, [B, H, C / size, D] fp16."""


def write_groups(
    parts: Parts, x: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor, bits: int, size: int
) -> None:
    """Quantize tokens with the scales and zeros of their groups, in place.

    An empty group gets the scales and zeros of the tokens that are written to it; any other one keeps its own, to which
    new tokens are clipped.

    Args:
        parts: The codes, scales and zeros.
        x: The tokens, [B, H, n, D] fp32.
        slots: See `Stage.write`.
        write_mask: See `Stage.write`.
        occupied: See `Stage.write`.
        bits: Bits per code.
        size: Tokens of a group.
    """
    codes, key_scale, key_zero = parts
    # The codes of occupied slots refer to the scale of their group, so it can only be fitted to an empty group.
    blocks = blocks_of(slots, write_mask, occupied, size)
    # The bounds of a block to which nothing is written are infinite. It is not new, so nothing of it is stored.
    is_long = is_compiled(x)
    new = call(_block_bounds, x, blocks.tokens(blocks.started)) if is_long else _bounds(x, blocks, slots, write_mask)
    scale, zero = scale_and_zero(*new, bits)
    put(key_scale, scale.half(), blocks.started, blocks.is_new)
    put(key_zero, zero.half(), blocks.started, blocks.is_new)
    # Read back, since a token may also go to an older group, which keeps its scale and zero.
    group = slots.div(size, rounding_mode="floor")
    if is_long:
        encoded = call(_encode, x, group, key_scale, key_zero, bits=bits)
    else:
        encoded = _encode(x, group, key_scale, key_zero, bits)
    put(codes, encoded, slots, write_mask)


def read_groups(parts: Parts, at: At, bits: int, size: int) -> Tensor:
    """What the codes of the slots `at` stand for, [B, H, n, D] fp32."""
    codes, scale, zero = parts
    code = unpack_float(take(codes, at), bits, scale.shape[-1])
    group = to_groups(at, size)
    scale = take(scale, group)  # applied in fp32, as the codes are
    zero = take(zero, group)
    if isinstance(at, slice):
        # The scales of a range are broadcast over the tokens of a group instead of being copied to each of them.
        grouped = code.unflatten(2, (-1, size))
        return grouped.mul_(scale[:, :, :, None]).add_(zero[:, :, :, None]).flatten(2, 3)
    return code.mul_(scale).add_(zero)


def score_groups(parts: Parts, queries: Tensor, bits: int) -> Tensor:
    """Products of queries [B, H, G, D] with what codes stand for, without decoding them, [B, H, G, C] fp32."""
    codes, scale, zero = parts
    words = as_words(codes, bits)
    scale, ordered = (in_order_of_places(t, words) for t in (scale, queries.float()))
    offsets = products(queries.float(), widen(zero))
    return call(score_token_groups, words, scale, offsets, ordered, bits=bits)


def _encode(x: Tensor, group: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Codes of tokens [B, H, n, D] in groups [B, H, n] that have the scales and zeros [B, H, X, D]."""
    scale, zero = (gather_slots(t, group).float() for t in (scale, zero))
    return pack(encode(x, scale, zero, bits), bits)


def _block_bounds(x: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """`_bounds` of blocks to which the tokens [B, H, F, size] are written, -1 for none, in one pass."""
    grouped = gather_slots(x, token.clamp_min(0).flatten(2)).unflatten(2, token.shape[2:])
    absent = (token < 0)[..., None]
    return grouped.masked_fill(absent, torch.inf).amin(3), grouped.masked_fill(absent, -torch.inf).amax(3)


def _bounds(x: Tensor, blocks: Blocks, slots: Tensor, write_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of what is written to each channel of the blocks `started`, [B, H, F, D] each.

    They are inf and -inf in blocks to which nothing is written.
    """
    batch, heads, count = blocks.started.shape
    # Tokens of blocks that are not in `started` go to an extra row at the end, which is cut off.
    inf = x.new_full((batch, heads, count + 1, x.shape[-1]), torch.inf)
    row = blocks.rows(slots)[..., None].expand_as(x)
    is_written = write_mask[..., None]
    least = inf.scatter_reduce(2, row, x.masked_fill(~is_written, torch.inf), "amin")
    most = (-inf).scatter_reduce(2, row, x.masked_fill(~is_written, -torch.inf), "amax")
    return least[:, :, :count], most[:, :, :count]
