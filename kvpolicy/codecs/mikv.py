"""MiKV: mixed precision by importance instead of eviction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs.buffer import buffer_sizes
from kvpolicy.codecs.common import mix_by_chunks, put, score_by_chunks, take
from kvpolicy.codecs.demotion import ByPriority
from kvpolicy.codecs.uniform import (
    FP16,
    channel_absmax,
    dequantize,
    freeze_scale,
    is_fused,
    largest_divisor,
    mix_fused,
    quantize,
    score_fused,
)
from kvpolicy.kernels.compiled import widen
from kvpolicy.kernels.packing import packed_width, round_to_half
from kvpolicy.protocols import (
    At,
    Codec,
    Layout,
    RotaryView,
    Stage,
    StageStore,
    Traits,
)
from kvpolicy.statistics import KeptStatistic
from kvpolicy.statistics.channel_sums import LargestQueries
from kvpolicy.text.strategy import AutoInt, between, least, strategy


class MiKVCodes(NamedTuple):
    """The tensors of one stage of a layer; `D'` is the bytes of D packed codes, `g` the groups of a token.

    Attributes:
        keys: Codes of balanced keys, [B, H, C, D'] uint8.
        key_scale: [B, H, C, g] fp16.
        key_zero: [B, H, C, g] fp16.
        channel_scale: The balancer: the factor of each key channel, [B, H, 1, D] fp16.
        values: Value codes, [B, H, C, D'] uint8.
        value_scale: [B, H, C, g] fp16.
        value_zero: [B, H, C, g] fp16.
    """

    keys: Tensor
    key_scale: Tensor
    key_zero: Tensor
    channel_scale: Tensor
    values: Tensor
    value_scale: Tensor
    value_zero: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class MiKVStage(Stage):
    """A stage of tokens of one precision.

    Args:
        bits: Bits per code.
        group_size: The maximum number of channels per group.
    """

    bits: int
    group_size: int

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> MiKVCodes:

        def zeros(count: int, width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, heads, count, width, dtype=dtype, device=device)

        packed = packed_width(head_dim, self.bits)
        groups = head_dim // largest_divisor(head_dim, self.group_size)
        return MiKVCodes(
            keys=zeros(slots, packed, torch.uint8),
            key_scale=zeros(slots, groups, torch.float16),
            key_zero=zeros(slots, groups, torch.float16),
            channel_scale=zeros(1, head_dim, torch.float16),
            values=zeros(slots, packed, torch.uint8),
            value_scale=zeros(slots, groups, torch.float16),
            value_zero=zeros(slots, groups, torch.float16),
        )

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        codes: MiKVCodes = store.codes
        if keys.shape[2] == 0 or codes.keys.shape[2] == 0:
            return
        keys = keys.float()
        balancer = _balancer(store.statistics[LargestQueries][:, :, None], channel_absmax(keys, write_mask))
        # `_balancer` rounds to fp16, so that decoding divides by exactly what keys are multiplied by here.
        keys = keys * freeze_scale(codes.channel_scale, balancer, write_mask, occupied)
        size = keys.shape[-1] // codes.key_scale.shape[-1]
        targets = (codes.keys, codes.key_scale, codes.key_zero, codes.values, codes.value_scale, codes.value_zero)
        encoded = (*quantize(keys, self.bits, size), *quantize(values.float(), self.bits, size))
        for target, data in zip(targets, encoded, strict=True):
            put(target, data, slots, write_mask)

    def keys(self, store: StageStore, at: At) -> Tensor:
        codes: MiKVCodes = store.codes
        code, scale, zero = (take(t, at) for t in (codes.keys, codes.key_scale, codes.key_zero))
        balanced = dequantize(code, scale, zero, self.bits, codes.channel_scale.shape[-1])
        return balanced / _factors(codes)

    def values(self, store: StageStore, at: At) -> Tensor:
        codes: MiKVCodes = store.codes
        code, scale, zero = (take(t, at) for t in (codes.values, codes.value_scale, codes.value_zero))
        return dequantize(code, scale, zero, self.bits, codes.channel_scale.shape[-1])

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        codes: MiKVCodes = store.codes
        if rope is None and is_fused(codes.keys, self.bits, queries.shape[-1]):
            queries = queries.float() / _factors(codes)
            return score_fused(codes.keys, codes.key_scale, codes.key_zero, queries, self.bits)
        return score_by_chunks(self.keys, store, queries, rope, codes.keys.shape[2])

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        codes: MiKVCodes = store.codes
        if is_fused(codes.values, self.bits, codes.channel_scale.shape[-1]):
            return mix_fused(codes.values, codes.value_scale, codes.value_zero, weights, self.bits)
        return mix_by_chunks(self.values, store, weights)


def _factors(codes: MiKVCodes) -> Tensor:
    """The factor of each key channel, [B, H, 1, D] fp32, 1 before the first write."""
    balancer = widen(codes.channel_scale)
    return balancer.masked_fill(balancer == 0, 1)


@strategy
class MiKV(Codec):
    """Store the tokens of highest priority in high precision, and all others in few bits instead of evicting them.

    Before a key is encoded, each channel is multiplied by a balancer: the square root of the largest absolute query in
    that channel of the prompt, divided by the largest absolute key. So a channel of large keys does not stretch the
    range of the others, and a channel of large queries, where errors matter most, gets more of the range. The newest
    tokens stay in full precision. A token in few bits stays in few bits, however its priority changes.

    Args:
        high: Fraction of the tokens in high precision, in [0, 1].
        high_bits: The high precision: 16 for full precision, 8 for codes of 8 bits.
        bits: Bits per code of all other tokens: 2, 3 or 4.
        group_size: The maximum number of channels per group (which has the largest divisor of the head dimension up to
            it).
        residual_length: How many of the newest tokens always stay in full precision. `auto`: one for every 32 tokens of
            the budget, less the block if `block_size` is `auto` too; at most 32.
        block_size: How many tokens are encoded at a time during decode. `auto`: one for every 32 tokens of the budget,
            at least 1 and at most 32.

    Examples:
        >>> MiKV().layout(1000)
        Layout(exact=231, coded=(800,))
        >>> MiKV(high_bits=8).layout(1000)
        Layout(exact=31, coded=(200, 800))

    Source:
        MiKV (arXiv:2402.18096), from its abstract and secondary texts: the paper was not read in full (unverified).
        Differences:

        - Importance is the priority of the policy's selector (H2O in the paper).
        - The balancer is fitted to the keys that a stage of a head receives while it is empty, and to the queries of
          the prompts so far (in the paper, to the prompt). It is rounded to fp16, and 1 for a channel whose queries or
          keys are all 0.
        - Queries are divided once, as in the paper, where codes are read without decoding them; elsewhere, keys are
          decoded to their original range.
        - The newest tokens stay in full precision, and tokens change their precision in blocks, only ever to fewer
          bits, re-encoded from what was decoded.
    """

    high: float = between(0, 1, 0.2)
    high_bits: Literal[8, 16] = 16
    bits: Literal[2, 3, 4] = 2
    group_size: int = least(1, 128)
    residual_length: AutoInt = least(0, "auto")
    block_size: AutoInt = least(1, "auto")

    @property
    def traits(self) -> Traits:
        """The tokens of lowest priority are demoted first."""
        return self.traits_for(None)

    def traits_for(self, tokens: int | None) -> Traits:
        residual, block = buffer_sizes(tokens, residual=self.residual_length, block=self.block_size)
        return Traits(block=block, residual=residual, demotion=ByPriority())

    @property
    def statistics(self) -> tuple[KeptStatistic, ...]:
        """The largest queries, for the balancer."""
        return (LargestQueries(),)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """A stage of few bits, preceded by one of 8 bits if that is the high precision."""
        low = MiKVStage(bits=self.bits, group_size=self.group_size)
        return (low,) if self.high_bits == 16 else (MiKVStage(bits=8, group_size=self.group_size), low)

    def layout(self, tokens: int) -> Layout:
        """Slots for the tokens in high precision, the residual and one block; everything else takes few bits."""
        high = math.ceil(self.high * tokens - 1e-6)  # in floating point, 0.07 * 100 is slightly more than 7
        traits = self.traits_for(tokens)
        exact = traits.residual + traits.block + (high if self.high_bits == 16 else 0)
        if tokens < exact:  # too few tokens to ever fill a block
            return Layout(tokens)
        # An automatic residual is not subtracted: it may grow with the same token as `high`, and no stage may shrink.
        coded = tokens - (0 if self.residual_length == "auto" else traits.residual)
        if self.high_bits == 16:
            return Layout(exact, (coded - high,))
        first = max(min(high, coded), traits.block)
        return Layout(exact, (first, coded - first))


def _balancer(queries: Tensor, keys: Tensor) -> Tensor:
    """The square root of the ratio of two maxima; 1 if either is 0. It is a positive finite number of fp16."""
    is_defined = (queries > 0) & (keys > 0)
    ratio = queries / keys.masked_fill(~is_defined, 1)
    root = ratio.masked_fill(~is_defined, 1).sqrt().clamp(torch.finfo(torch.float16).tiny, FP16)
    return round_to_half(root)
