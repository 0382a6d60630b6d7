"""Every token is kept: what matters precisely, all else in few bits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs._common import check_least, mix_by_chunks, put, score_by_chunks, take
from kvpolicy.codecs._uniform import FP16, dequantize, largest_divisor, largest_size, quantize, settle
from kvpolicy.codecs.packing import packed_width, round_to_half
from kvpolicy.protocols import ALL_HEADS, At, Calibration, Layout, ModelInfo, RotaryView, Stage, StageStore, Traits
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.validation import check_fields


class MiKVCodes(NamedTuple):
    """What MiKV stores of one precision of a layer; `D'` is the bytes of D packed codes, `g` the groups of a token.

    Attributes:
        keys: Codes of balanced keys, [B, H, C, D'] uint8.
        key_scale: [B, H, C, g] fp16.
        key_zero: [B, H, C, g] fp16.
        channel_scale: What each channel of a key is multiplied by, [B, H, 1, D] fp16.
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
class MiKVStage:
    """Tokens of one precision.

    Args:
        bits: Bits per code.
        group_size: The most channels of a group.
    """

    bits: int
    group_size: int

    def load_calibration(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> Calibration:
        """Nothing is calibrated."""
        return ()

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> MiKVCodes:
        """Empty codes for `slots` slots."""

        def zeros(count: int, width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, heads, count, width, dtype=dtype, device=device)

        packed, groups = packed_width(head_dim, self.bits), head_dim // largest_divisor(head_dim, self.group_size)
        return MiKVCodes(
            zeros(slots, packed, torch.uint8),
            zeros(slots, groups, torch.float16),
            zeros(slots, groups, torch.float16),
            zeros(1, head_dim, torch.float16),
            zeros(slots, packed, torch.uint8),
            zeros(slots, groups, torch.float16),
            zeros(slots, groups, torch.float16),
        )

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        """Encode tokens into slots, in place; see `Stage.write`."""
        codes: MiKVCodes = store.codes
        if keys.shape[2] == 0 or codes.keys.shape[2] == 0:
            return
        assert store.query_absmax is not None, "MiKV's traits ask for query_absmax"
        keys = keys.float()
        balancer = _balancer(store.query_absmax[:, :, None], largest_size(keys, write_mask))
        keys = keys * settle(codes.channel_scale, balancer, write_mask, occupied)
        size = keys.shape[-1] // codes.key_scale.shape[-1]
        targets = (codes.keys, codes.key_scale, codes.key_zero, codes.values, codes.value_scale, codes.value_zero)
        parts = (*quantize(keys, self.bits, size), *quantize(values.float(), self.bits, size))
        for target, part in zip(targets, parts, strict=True):
            put(target, part, slots, write_mask)

    def keys(self, store: StageStore, at: At) -> Tensor:
        """Keys of the slots `at`, [B, H, n, D] fp32."""
        codes: MiKVCodes = store.codes
        code, scale, zero = (take(t, at) for t in (codes.keys, codes.key_scale, codes.key_zero))
        balanced = dequantize(code, scale, zero, self.bits, codes.channel_scale.shape[-1])
        balancer = codes.channel_scale.float()
        return balanced / balancer.masked_fill(balancer == 0, 1)  # 0 before anything is written

    def values(self, store: StageStore, at: At) -> Tensor:
        """Values of the slots `at`, [B, H, n, D] fp32."""
        codes: MiKVCodes = store.codes
        code, scale, zero = (take(t, at) for t in (codes.values, codes.value_scale, codes.value_zero))
        return dequantize(code, scale, zero, self.bits, codes.channel_scale.shape[-1])

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        """Products of queries with every slot's key; see `Stage.score`."""
        return score_by_chunks(self.keys, store, queries, rope, store.codes.keys.shape[2])

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        """Every slot's value, weighted and summed; see `Stage.mix`."""
        return mix_by_chunks(self.values, store, weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class MiKV:
    """Keep the tokens that the selector rates highest precisely, and all others in few bits instead of evicting them.

    Before a key is coded, each of its channels is multiplied by a balancer: the root of the largest query number of
    that channel in the prompt over the largest key number. So a channel of large keys does not stretch the range of the
    others, and a channel of large queries, where an error would count, gets more of the range. The newest tokens stay
    exact. A token that has been coded in few bits stays so, however its rating changes.

    Args:
        high: Share of the tokens that is kept precisely, 0 to 1.
        high_bits: How those are kept: 16 for exactly, 8 for codes of 8 bits.
        bits: Bits per code of all others: 2, 3 or 4.
        group_size: The most channels of a group (the largest divisor of the head dimension that is not above it).
        residual_length: How many of the newest tokens always stay exact.
        block_size: How many tokens are coded at a time in decode.

    Examples:
        >>> MiKV().layout(1000)
        Layout(exact=264, coded=(768,))
        >>> MiKV(high_bits=8).layout(1000)
        Layout(exact=64, coded=(200, 768))

    Source: MiKV (arXiv:2402.18096), from its abstract and secondary texts: the paper was not read in full (unverified).
    Differences: importance is that of the policy's selector (H2O's in the paper). The balancer is fitted anew where a
    part of a head is empty, to the keys that this part then receives, and is rounded to fp16; where a channel's queries
    or keys are all 0 it is 1. Keys are decoded to their own range, instead of dividing queries once. The newest tokens
    stay exact, and tokens change their precision in blocks, each time coded anew from what was decoded.
    """

    high: float = 0.2
    high_bits: Literal[8, 16] = 16
    bits: Literal[2, 3, 4] = 2
    group_size: int = 128
    residual_length: int = 32
    block_size: int = 32

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_fields(self)
        if not 0 <= self.high <= 1:
            raise KVPolicyError(f"MiKV's high is {self.high}: give a share from 0 to 1, such as 0.2.")
        if self.high_bits not in (8, 16):
            raise KVPolicyError(f"MiKV's high_bits is {self.high_bits!r}: give 8 or 16.")
        if self.bits not in (2, 3, 4):
            raise KVPolicyError(f"MiKV's bits is {self.bits!r}: give 2, 3 or 4.")
        check_least(self, group_size=(1, 128), residual_length=(0, 32), block_size=(1, 32))

    @property
    def traits(self) -> Traits:
        """The least worthy tokens leave first."""
        return Traits(block=self.block_size, residual=self.residual_length, demote_by="priority", query_absmax=True)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Of few bits, and before it of 8 bits if those are wanted."""
        low = MiKVStage(bits=self.bits, group_size=self.group_size)
        return (low,) if self.high_bits == 16 else (MiKVStage(bits=8, group_size=self.group_size), low)

    def layout(self, tokens: int) -> Layout:
        """Room for the precise tokens, the residual and one block, and all else in few bits."""
        high = math.ceil(self.high * tokens - 1e-6)  # 0.07 * 100 is a little more than 7
        exact = self.residual_length + self.block_size + (high if self.high_bits == 16 else 0)
        if tokens < exact:  # too few to ever fill a block
            return Layout(tokens)
        coded = tokens - self.residual_length
        if self.high_bits == 16:
            return Layout(exact, (coded - high,))
        first = max(min(high, coded), self.block_size)
        return Layout(exact, (first, coded - first))

    def check(self, model: ModelInfo) -> None:
        """Every model's vectors can be coded."""


def _balancer(queries: Tensor, keys: Tensor) -> Tensor:
    """The root of the ratio of two maxima, 1 where either is 0; its fp16 is exact and never 0 or infinite."""
    known = (queries > 0) & (keys > 0)
    ratio = queries / keys.masked_fill(~known, 1)
    root = ratio.masked_fill(~known, 1).sqrt().clamp(torch.finfo(torch.float16).tiny, FP16)
    return round_to_half(root)
