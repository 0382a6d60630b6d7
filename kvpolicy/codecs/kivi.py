"""KIVI: quantization of keys per channel and of values per token."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs.blocks import Blocks, blocks_of
from kvpolicy.codecs.buffer import buffer_sizes
from kvpolicy.codecs.common import TwoSides, mix_by_chunks, put, score_by_chunks, take, to_groups
from kvpolicy.codecs.side_bits import SideBits
from kvpolicy.codecs.uniform import (
    dequantize,
    encode,
    is_fused,
    largest_divisor,
    mix_fused,
    quantize,
    scale_and_zero,
)
from kvpolicy.kernels.compiled import call, is_compiled, widen
from kvpolicy.kernels.fused_read import score_token_groups
from kvpolicy.kernels.packing import pack, unpack_float
from kvpolicy.kernels.products import products
from kvpolicy.kernels.slot_writes import gather_slots
from kvpolicy.kernels.words import as_words, in_order_of_places
from kvpolicy.protocols import At, ModelInfo, RotaryView, StageStore, Traits
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import AutoInt, least, strategy


class KIVICodes(NamedTuple):
    """The tensors of one layer; `D'` is D * bits / 8 of the side, `g` the group size, `v` a value group's channels.

    Attributes:
        keys: Key codes, [B, H, C, D'] uint8.
        key_scale: [B, H, C / g, D] fp16.
        key_zero: [B, H, C / g, D] fp16.
        values: Value codes, [B, H, C, D'] uint8.
        value_scale: [B, H, C, D / v] fp16.
        value_zero: [B, H, C, D / v] fp16.
    """

    keys: Tensor
    key_scale: Tensor
    key_zero: Tensor
    values: Tensor
    value_scale: Tensor
    value_zero: Tensor


@strategy
class KIVI(SideBits, TwoSides):
    """Quantize keys per channel and values per token, both in groups.

    Keys have outlier channels, so a group of keys is one channel of `group_size` tokens. Values have none, so a group
    of values consists of channels of one token. Each group has a scale and a zero in fp16. The newest tokens stay in
    full precision. With groups of 32, an element takes 3 bits at `bits=2`, and 5 at `bits=4`.

    Args:
        bits: Bits per code: 2, 4 or 8.
        key_bits: Bits per code of keys, which have outliers; `auto`: `bits`.
        value_bits: Bits per code of values; `auto`: `bits`.
        group_size: Tokens per key group, and the maximum number of channels per value group (which has the largest
            divisor of the head dimension up to it).
        residual_length: How many of the newest tokens always stay in full precision. `auto`: one for every 32 tokens of
            the budget, at most 128.

    Examples:
        >>> KIVI(bits=4).layout(1000)
        Layout(exact=63, coded=(992,))

    Source:
        KIVI (arXiv:2402.02750), Section 3 and Algorithm 1; keys after the rotary embedding, as in its code.
        Differences:

        - Keys and values share one full-precision buffer of `residual_length` to `residual_length + group_size` tokens,
          which is flushed one group at a time, so the newest keys are always in full precision. KIVI flushes keys
          `residual_length` at a time, which empties its buffer of them, and values one by one, so that
          `residual_length` stay.
        - A group of equal elements has code 0 (0/0 in the authors' code).
        - Codes are packed into bytes along the channels; the authors' code packs 32-bit words along the grouped
          dimension.
        - Under eviction, a new token takes the slot of an evicted one. Its key is encoded with the scale and zero of
          the group, and clipped, until the whole group is empty.
    """

    bits: Literal[2, 4, 8] = 2
    key_bits: Literal[2, 4, 8, "auto"] = "auto"
    value_bits: Literal[2, 4, 8, "auto"] = "auto"
    group_size: int = least(1, 32)
    residual_length: AutoInt = least(0, "auto")

    @property
    def traits(self) -> Traits:
        """Tokens are encoded in blocks of one key group."""
        return self.traits_for(None)

    def traits_for(self, tokens: int | None) -> Traits:
        residual, block = buffer_sizes(
            tokens, residual=self.residual_length, block=self.group_size, largest_residual=128
        )
        return Traits(block=block, group_size=self.group_size, residual=residual)

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if the codes of a vector do not fill whole bytes."""
        bits = min(self.bits_of_keys, self.bits_of_values)
        per_byte = 8 // bits
        if model.head_dim % per_byte:
            raise KVPolicyError(
                f"The head dimension must be a multiple of {per_byte} for KIVI.bits={bits}, got "
                f"{model.head_dim}; try bits=8."
            )

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> KIVICodes:
        assert slots % self.group_size == 0, "only whole groups can be encoded"

        def zeros(count: int, width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, heads, count, width, dtype=dtype, device=device)

        key_groups = slots // self.group_size
        value_groups = head_dim // largest_divisor(head_dim, self.group_size)
        return KIVICodes(
            keys=zeros(slots, head_dim * self.bits_of_keys // 8, torch.uint8),
            key_scale=zeros(key_groups, head_dim, torch.float16),
            key_zero=zeros(key_groups, head_dim, torch.float16),
            values=zeros(slots, head_dim * self.bits_of_values // 8, torch.uint8),
            value_scale=zeros(slots, value_groups, torch.float16),
            value_zero=zeros(slots, value_groups, torch.float16),
        )

    def write_keys(self, store: StageStore, keys: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor) -> None:
        codes: KIVICodes = store.codes
        if keys.shape[2] == 0 or codes.keys.shape[2] == 0:
            return
        keys = keys.float()
        # The codes of occupied slots refer to the scale of their group, so it can only be fitted to an empty group.
        blocks = blocks_of(slots, write_mask, occupied, self.group_size)
        # The bounds of a block to which nothing is written are infinite. It is not new, so nothing of it is stored.
        is_long = is_compiled(keys)
        if is_long:
            bounds = call(_block_bounds, keys, blocks.tokens(blocks.started))
        else:
            bounds = _bounds(keys, blocks, slots, write_mask)
        scale, zero = scale_and_zero(*bounds, self.bits_of_keys)
        put(codes.key_scale, scale.half(), blocks.started, blocks.is_new)
        put(codes.key_zero, zero.half(), blocks.started, blocks.is_new)
        # Read back, since a token may also go to an older group, which keeps its scale and zero.
        group = slots.div(self.group_size, rounding_mode="floor")
        if is_long:
            encoded = call(_encode_keys, keys, group, codes.key_scale, codes.key_zero, bits=self.bits_of_keys)
        else:
            encoded = _encode_keys(keys, group, codes.key_scale, codes.key_zero, self.bits_of_keys)
        put(codes.keys, encoded, slots, write_mask)

    def write_values(
        self, store: StageStore, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        codes: KIVICodes = store.codes
        if values.shape[2] == 0 or codes.values.shape[2] == 0:
            return
        parts = quantize(values.float(), self.bits_of_values, values.shape[-1] // codes.value_scale.shape[-1])
        for target, part in zip(codes[3:], parts, strict=True):
            put(target, part, slots, write_mask)

    def keys(self, store: StageStore, at: At) -> Tensor:
        codes: KIVICodes = store.codes
        code = unpack_float(take(codes.keys, at), self.bits_of_keys)
        group = to_groups(at, self.group_size)
        scale = take(codes.key_scale, group)  # applied in fp32, as the codes are
        zero = take(codes.key_zero, group)
        if isinstance(at, slice):
            # The scales of a range are broadcast over the tokens of a group instead of being copied to each of them.
            grouped = code.unflatten(2, (-1, self.group_size))
            return grouped.mul_(scale[:, :, :, None]).add_(zero[:, :, :, None]).flatten(2, 3)
        return code.mul_(scale).add_(zero)

    def values(self, store: StageStore, at: At) -> Tensor:
        codes: KIVICodes = store.codes
        code, scale, zero = (take(t, at) for t in (codes.values, codes.value_scale, codes.value_zero))
        return dequantize(code, scale, zero, self.bits_of_values, codes.key_scale.shape[-1])

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        codes: KIVICodes = store.codes
        if rope is None and is_fused(codes.keys, self.bits_of_keys, queries.shape[-1]):
            words = as_words(codes.keys, self.bits_of_keys)
            scale, ordered = (in_order_of_places(t, words) for t in (codes.key_scale, queries.float()))
            offsets = products(queries.float(), widen(codes.key_zero))
            return call(score_token_groups, words, scale, offsets, ordered, bits=self.bits_of_keys)
        return score_by_chunks(self.keys, store, queries, rope, codes.keys.shape[2], self.group_size)

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        codes: KIVICodes = store.codes
        if is_fused(codes.values, self.bits_of_values, codes.key_scale.shape[-1]):
            return mix_fused(codes.values, codes.value_scale, codes.value_zero, weights, self.bits_of_values)
        return mix_by_chunks(self.values, store, weights, self.group_size)


def _encode_keys(keys: Tensor, group: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Codes of keys [B, H, n, D] in groups [B, H, n] that have the scales and zeros [B, H, X, D]."""
    scale, zero = (gather_slots(t, group).float() for t in (scale, zero))
    return pack(encode(keys, scale, zero, bits), bits)


def _block_bounds(keys: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """`_bounds` of blocks to which the tokens [B, H, F, size] are written, -1 for none, in one pass."""
    grouped = gather_slots(keys, token.clamp_min(0).flatten(2)).unflatten(2, token.shape[2:])
    absent = (token < 0)[..., None]
    return grouped.masked_fill(absent, torch.inf).amin(3), grouped.masked_fill(absent, -torch.inf).amax(3)


def _bounds(keys: Tensor, blocks: Blocks, slots: Tensor, write_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of what is written to each channel of the blocks `started`, [B, H, F, D] each.

    They are inf and -inf in blocks to which nothing is written.
    """
    batch, heads, count = blocks.started.shape
    # Tokens of blocks that are not in `started` go to an extra row at the end, which is cut off.
    inf = keys.new_full((batch, heads, count + 1, keys.shape[-1]), torch.inf)
    row = blocks.rows(slots)[..., None].expand_as(keys)
    is_written = write_mask[..., None]
    least = inf.scatter_reduce(2, row, keys.masked_fill(~is_written, torch.inf), "amin")
    most = (-inf).scatter_reduce(2, row, keys.masked_fill(~is_written, -torch.inf), "amax")
    return least[:, :, :count], most[:, :, :count]
