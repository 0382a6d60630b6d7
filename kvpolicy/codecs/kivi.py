"""KIVI: quantization of keys per channel and of values per token."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs.buffer import buffer_sizes
from kvpolicy.codecs.common import TwoSides, mix_by_chunks, put, score_by_chunks, take
from kvpolicy.codecs.side_bits import SideBits
from kvpolicy.codecs.token_groups import read_groups, score_groups, write_groups
from kvpolicy.codecs.uniform import dequantize, is_fused, largest_divisor, mix_fused, quantize
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
        write_groups(codes[:3], keys.float(), slots, write_mask, occupied, self.bits_of_keys, self.group_size)

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
        return read_groups(codes[:3], at, self.bits_of_keys, self.group_size)

    def values(self, store: StageStore, at: At) -> Tensor:
        codes: KIVICodes = store.codes
        code, scale, zero = (take(t, at) for t in (codes.values, codes.value_scale, codes.value_zero))
        return dequantize(code, scale, zero, self.bits_of_values, codes.key_scale.shape[-1])

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        codes: KIVICodes = store.codes
        if rope is None and is_fused(codes.keys, self.bits_of_keys, queries.shape[-1]):
            return score_groups(codes[:3], queries, self.bits_of_keys)
        return score_by_chunks(self.keys, store, queries, rope, codes.keys.shape[2], self.group_size)

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        codes: KIVICodes = store.codes
        if is_fused(codes.values, self.bits_of_values, codes.key_scale.shape[-1]):
            return mix_fused(codes.values, codes.value_scale, codes.value_zero, weights, self.bits_of_values)
        return mix_by_chunks(self.values, store, weights, self.group_size)
