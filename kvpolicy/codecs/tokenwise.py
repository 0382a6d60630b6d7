"""TokenWise: quantization of each token separately."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs import e4m3
from kvpolicy.codecs.buffer import buffer_sizes
from kvpolicy.codecs.common import (
    ENCODED_AT_ONCE,
    TwoSides,
    is_empty_head,
    mix_by_chunks,
    put,
    score_by_chunks,
    sum_tokens,
    take,
    token_ranges,
)
from kvpolicy.codecs.side_bits import SideBits
from kvpolicy.codecs.uniform import FP16, dequantize, is_fused, largest_divisor, mix_fused, quantize, score_fused
from kvpolicy.kernels.compiled import widen
from kvpolicy.kernels.packing import packed_width, round_to_half
from kvpolicy.protocols import At, RotaryView, StageStore, Traits
from kvpolicy.text.strategy import AutoInt, least, strategy


class TokenWiseCodes(NamedTuple):
    """The tensors of one layer; `D'` is the bytes of D codes, `g` the channels of a group.

    Attributes:
        keys: Codes of normalized keys, [B, H, C, D'] uint8.
        key_scale: [B, H, C, D / g] fp16.
        key_zero: [B, H, C, D / g] fp16; of width 0 for fp8.
        channel_scale: Standard deviation of each key channel, [B, H, 1, D] fp16; [B, H, 0, D] without `normalize`.
        channel_zero: Mean of each key channel, like `channel_scale`.
        values: Value codes, [B, H, C, D'] uint8.
        value_scale: [B, H, C, D / g] fp16.
        value_zero: [B, H, C, D / g] fp16; of width 0 for fp8.
    """

    keys: Tensor
    key_scale: Tensor
    key_zero: Tensor
    channel_scale: Tensor
    channel_zero: Tensor
    values: Tensor
    value_scale: Tensor
    value_zero: Tensor


@strategy
class TokenWise(SideBits, TwoSides):
    """Quantize each token separately, after normalizing the key channels.

    A group consists of channels of one token of one head, with a scale and a zero in fp16. So every slot can be reused
    without additional error, which suits selectors that evict single tokens. Keys have outlier channels, which would
    widen the range of every group. So the mean of each key channel is subtracted first, and the result is divided by
    the standard deviation. Both are computed from the first tokens that are encoded in a head, and stay until all of
    its encoded tokens are gone. At `bits=4` with groups of 128, an element takes 4.25 bits.

    Args:
        bits: Bits per code: 2, 3, 4 or 8; or `fp8`: floating point with 4 bits of exponent and 3 of mantissa (e4m3),
            with a scale and no zero.
        key_bits: Bits per code of keys, which have outliers; `auto`: `bits`.
        value_bits: Bits per code of values; `auto`: `bits`.
        group_size: The maximum number of channels per group (which has the largest divisor of the head dimension up to
            it).
        residual_length: How many of the newest tokens always stay in full precision. `auto`: one for every 32 tokens of
            the budget, less the block if `block_size` is `auto` too; at most 32.
        block_size: How many tokens are encoded at a time. `auto`: one for every 32 tokens of the budget, at
            least 1 and at most 32.
        normalize: Whether key channels are normalized.

    Raises:
        KVPolicyError: If a parameter is out of range.

    Examples:
        >>> TokenWise(bits=4).layout(1000)
        Layout(exact=31, coded=(1000,))

    Source:
        our own composition, not a paper's. Scale and zero per token and group are what inference engines call per-token
        quantization; mean and standard deviation per channel replace KIVI's (arXiv:2402.02750) key groups along tokens.
        ZipCache (2024) divides channels by the square root of their largest element instead (according to a
        specification; unverified).

        - Mean and standard deviation come from the first tokens that are encoded in a head, not from calibration.
        - The standard deviation is 1 for a constant channel, and never less than the error of its mean in fp16.
        - Values are not normalized.
        - A group of equal elements has code 0, so its only error is the rounding of its zero.
        - In fp8, a group whose elements are all less than 448 times half the smallest number of fp16, about 1.3e-5,
          is 0.
    """

    bits: Literal[2, 3, 4, 8, "fp8"] = 4
    key_bits: Literal[2, 3, 4, 8, "fp8", "auto"] = "auto"
    value_bits: Literal[2, 3, 4, 8, "fp8", "auto"] = "auto"
    group_size: int = least(1, 128)
    residual_length: AutoInt = least(0, "auto")
    block_size: AutoInt = least(1, "auto")
    normalize: bool = True

    @property
    def traits(self) -> Traits:
        """Tokens are encoded in blocks; slots share only the mean and standard deviation of their head."""
        return self.traits_for(None)

    def traits_for(self, tokens: int | None) -> Traits:
        residual, block = buffer_sizes(tokens, residual=self.residual_length, block=self.block_size)
        return Traits(
            block=block, residual=residual, per_head=("channel_scale", "channel_zero"), at_once=ENCODED_AT_ONCE
        )

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> TokenWiseCodes:

        def zeros(count: int, width: int, dtype: torch.dtype = torch.float16) -> Tensor:
            return torch.zeros(batch, heads, count, width, dtype=dtype, device=device)

        groups = head_dim // largest_divisor(head_dim, self.group_size)
        key_bits = self.bits_of_keys
        value_bits = self.bits_of_values
        per_channel = int(self.normalize)
        return TokenWiseCodes(
            keys=zeros(slots, packed_width(head_dim, _code_bits(key_bits)), torch.uint8),
            key_scale=zeros(slots, groups),
            key_zero=zeros(slots, 0 if key_bits == "fp8" else groups),
            channel_scale=zeros(per_channel, head_dim),
            channel_zero=zeros(per_channel, head_dim),
            values=zeros(slots, packed_width(head_dim, _code_bits(value_bits)), torch.uint8),
            value_scale=zeros(slots, groups),
            value_zero=zeros(slots, 0 if value_bits == "fp8" else groups),
        )

    def write_keys(self, store: StageStore, keys: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor) -> None:
        codes: TokenWiseCodes = store.codes
        if keys.shape[2] == 0 or codes.keys.shape[2] == 0:
            return
        if self.normalize:
            _fit(codes, keys, write_mask, occupied)
        targets = (codes.keys, codes.key_scale, codes.key_zero)
        for at in token_ranges(keys.shape[2]):
            some = keys[:, :, at].float()
            if self.normalize:
                # Read back as fp16, also where they were just fitted: decoding has no other numbers.
                some = (some - codes.channel_zero.float()) / codes.channel_scale.float()
            _put(targets, some, slots[:, :, at], write_mask[:, :, at], self.bits_of_keys)

    def write_values(
        self, store: StageStore, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        codes: TokenWiseCodes = store.codes
        if values.shape[2] == 0 or codes.values.shape[2] == 0:
            return
        targets = (codes.values, codes.value_scale, codes.value_zero)
        for at in token_ranges(values.shape[2]):
            _put(targets, values[:, :, at].float(), slots[:, :, at], write_mask[:, :, at], self.bits_of_values)

    def keys(self, store: StageStore, at: At) -> Tensor:
        codes: TokenWiseCodes = store.codes
        # `channel_scale` has the width D even if it has no row; the bytes of the codes may end in padding.
        parts = (codes.keys, codes.key_scale, codes.key_zero)
        keys = _decode(parts, at, codes.channel_scale.shape[-1], self.bits_of_keys)
        if not self.normalize:
            return keys
        return torch.addcmul(codes.channel_zero, keys, codes.channel_scale)  # one pass over the keys

    def values(self, store: StageStore, at: At) -> Tensor:
        codes: TokenWiseCodes = store.codes
        parts = (codes.values, codes.value_scale, codes.value_zero)
        return _decode(parts, at, codes.channel_scale.shape[-1], self.bits_of_values)

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        codes: TokenWiseCodes = store.codes
        bits = self.bits_of_keys
        if rope is not None or not is_fused(codes.keys, _code_bits(bits), queries.shape[-1], store.page_slots):
            return score_by_chunks(self.keys, store, queries, rope, codes.keys.shape[2])
        queries = queries.float()
        scaled = queries * widen(codes.channel_scale) if self.normalize else queries
        if bits == "fp8":
            scores = e4m3.score_fused(codes.keys, codes.key_scale, scaled)
        else:
            scores = score_fused(codes.keys, codes.key_scale, codes.key_zero, scaled, bits)
        return scores + (queries * widen(codes.channel_zero)).sum(-1, keepdim=True) if self.normalize else scores

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        codes: TokenWiseCodes = store.codes
        bits = self.bits_of_values
        if not is_fused(codes.values, _code_bits(bits), codes.channel_scale.shape[-1], store.page_slots):
            return mix_by_chunks(self.values, store, weights)
        if bits == "fp8":
            return e4m3.mix_fused(codes.values, codes.value_scale, weights)
        return mix_fused(codes.values, codes.value_scale, codes.value_zero, weights, bits)


def _put(
    targets: tuple[Tensor, Tensor, Tensor], x: Tensor, slots: Tensor, write_mask: Tensor, bits: int | Literal["fp8"]
) -> None:
    """Write the codes, scales and zeros of `x` [B, H, n, D]."""
    for target, data in zip(targets, _encode(x, targets[1].shape[-1], bits), strict=True):
        if target.shape[-1]:
            put(target, data, slots, write_mask)


def _code_bits(bits: int | Literal["fp8"]) -> int:
    """Bits per code."""
    return 8 if bits == "fp8" else bits


def _encode(x: Tensor, groups: int, bits: int | Literal["fp8"]) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes, scales and zeros of `x` [B, H, n, D], with `groups` groups per token."""
    size = x.shape[-1] // groups
    if bits != "fp8":
        return quantize(x, bits, size)
    code, scale = e4m3.quantize(x, size)
    return code, scale, scale[..., :0]


def _decode(parts: tuple[Tensor, Tensor, Tensor], at: At, head_dim: int, bits: int | Literal["fp8"]) -> Tensor:
    """The vectors that codes, scales and zeros of the slots `at` stand for."""
    codes = take(parts[0], at)
    scale = take(parts[1], at)
    if bits != "fp8":
        return dequantize(codes, scale, take(parts[2], at), bits, head_dim)
    return e4m3.dequantize(codes, scale)


def _fit(codes: TokenWiseCodes, keys: Tensor, write_mask: Tensor, occupied: Tensor) -> None:
    """Compute mean and standard deviation of each channel, in heads without an occupied slot."""
    count = write_mask.sum(-1)[..., None, None].clamp(min=1)
    mean = (sum_tokens(keys, write_mask, lambda x: x) / count).float()
    deviation = (sum_tokens(keys, write_mask, lambda x: (x - mean).square()) / count).sqrt().float()
    deviation = round_to_half(deviation.clamp(max=FP16))
    rounded = round_to_half(mean.clamp(-FP16, FP16))
    # Divided by less than this, the rounding error of the mean alone would be the largest element of its group.
    deviation = torch.where(deviation == 0, 1, deviation).maximum((mean - rounded).abs().clamp(max=FP16))
    is_fitted = is_empty_head(write_mask, occupied)
    codes.channel_zero.copy_(torch.where(is_fitted, rounded.half(), codes.channel_zero))
    codes.channel_scale.copy_(torch.where(is_fitted, round_to_half(deviation).half(), codes.channel_scale))
