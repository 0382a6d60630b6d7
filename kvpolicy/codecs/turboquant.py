"""TurboQuant: keys as a norm and a direction, whose mixed channels are nearly normally distributed."""

from __future__ import annotations

import math
import operator
from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs.buffer import buffer_sizes
from kvpolicy.codecs.common import (
    ENCODED_AT_ONCE,
    TwoSides,
    mix_by_chunks,
    put,
    score_by_chunks,
    take,
    token_ranges,
)
from kvpolicy.codecs.rotation import constant, constant_result, mix, mixing, unmix
from kvpolicy.codecs.side_bits import SideBits
from kvpolicy.codecs.uniform import FP16, dequantize, is_fused, largest_divisor, mix_fused, quantize
from kvpolicy.kernels.compiled import call, widen
from kvpolicy.kernels.fused_elements import score_levels
from kvpolicy.kernels.packing import pack, packed_width, unpack
from kvpolicy.kernels.words import as_words, in_order_of_places
from kvpolicy.protocols import At, ModelInfo, RotaryView, StageStore, Traits
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import AutoInt, least, strategy

_VALUE_GROUP = 128
"""The maximum number of channels per value group."""


class TurboQuantCodes(NamedTuple):
    """The tensors of one layer; `D'` is the bytes of D packed codes, `v` the channels of a value group.

    Attributes:
        keys: Codes of mixed keys, [B, H, C, D'] uint8.
        key_scale: Norms of keys, [B, H, C, 1] fp16.
        values: Value codes, [B, H, C, D'] uint8.
        value_scale: [B, H, C, D / v] fp16.
        value_zero: [B, H, C, D / v] fp16.
    """

    keys: Tensor
    key_scale: Tensor
    values: Tensor
    value_scale: Tensor
    value_zero: Tensor


@strategy
class TurboQuant(SideBits, TwoSides):
    """Quantize each token separately: the direction of a key with fixed levels, a value by its range.

    Random signs and a Hadamard transform turn any key into one whose channels are nearly normally distributed. So the
    levels that are optimal for a normal distribution fit every key, and a key only needs its norm in addition to its
    codes. Queries are mixed too, so keys need not be unmixed. Values have a scale and a zero per 128 channels or fewer.
    The newest tokens stay in full precision.

    Args:
        bits: Bits per code: 2, 3 or 4.
        key_bits: Bits per code of keys, which have outliers; `auto`: `bits`.
        value_bits: Bits per code of values; `auto`: `bits`.
        seed: Seed of the random signs, at least 0.
        residual_length: How many of the newest tokens always stay in full precision. `auto`: one for every 32 tokens of
            the budget, less the block if `block_size` is `auto` too; at most 32.
        block_size: How many tokens are encoded at a time during decode. `auto`: one for every 32 tokens of the budget,
            at least 1 and at most 32.

    Examples:
        >>> TurboQuant().layout(1000)
        Layout(exact=31, coded=(1000,))

    Source:
        TurboQuant (arXiv:2504.19874), as implemented in vLLM; the paper itself was not read in full (unverified).
        Differences:

        - The paper mixes with a dense random rotation and uses levels for the exact distribution of a channel of a
          direction; a Hadamard matrix (and a cosine transform, if the head dimension is not a power of two) and the
          normal distribution come close.
        - The second step of the paper's inner-product form (QJL, one bit for the sign of the error) is omitted, as in
          vLLM, since it hurts attention.
        - The norm of decoded keys is not corrected, unlike in vLLM.
        - vLLM keeps the first and last two layers in full precision; here all layers are treated alike, and the newest
          tokens are in full precision instead.
        - vLLM has since dropped the random signs.
    """

    bits: Literal[2, 3, 4] = 4
    key_bits: Literal[2, 3, 4, "auto"] = "auto"
    value_bits: Literal[2, 3, 4, "auto"] = "auto"
    seed: int = least(0, 0)
    residual_length: AutoInt = least(0, "auto")
    block_size: AutoInt = least(1, "auto")

    @property
    def traits(self) -> Traits:
        """The code of a token does not depend on other tokens."""
        return self.traits_for(None)

    def traits_for(self, tokens: int | None) -> Traits:
        residual, block = buffer_sizes(tokens, residual=self.residual_length, block=self.block_size)
        return Traits(block=block, residual=residual, per_head=(), at_once=ENCODED_AT_ONCE)

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if the codes of a vector do not fill whole bytes."""
        for name, bits in (("key_bits", self.bits_of_keys), ("value_bits", self.bits_of_values)):
            codes = 8 // math.gcd(8, bits)
            if model.head_dim % codes:
                option = "bits" if self.bits_of_keys == self.bits_of_values else name
                raise KVPolicyError(
                    f"The head dimension must be a multiple of {codes} for TurboQuant.{option}={bits}, got "
                    f"{model.head_dim}; try {'MiKV' if bits == 4 else f'{option}=4'}."
                )

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> TurboQuantCodes:

        def zeros(width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, heads, slots, width, dtype=dtype, device=device)

        groups = head_dim // largest_divisor(head_dim, _VALUE_GROUP)
        return TurboQuantCodes(
            keys=zeros(packed_width(head_dim, self.bits_of_keys), torch.uint8),
            key_scale=zeros(1, torch.float16),
            values=zeros(packed_width(head_dim, self.bits_of_values), torch.uint8),
            value_scale=zeros(groups, torch.float16),
            value_zero=zeros(groups, torch.float16),
        )

    def write_keys(self, store: StageStore, keys: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor) -> None:
        codes: TurboQuantCodes = store.codes
        if keys.shape[2] == 0 or codes.keys.shape[2] == 0:
            return
        for at in token_ranges(keys.shape[2]):
            self._write_keys(codes, keys[:, :, at], slots[:, :, at], write_mask[:, :, at])

    def _write_keys(self, codes: TurboQuantCodes, keys: Tensor, slots: Tensor, write_mask: Tensor) -> None:
        """Encode keys at once."""
        mixed = mix(keys.float(), self.seed)
        norm = _norm(mixed)
        # The channels of a unit vector of D elements have a variance of 1 / D; the levels are for a variance of 1.
        normal = mixed / norm.masked_fill(norm == 0, 1) * mixed.shape[-1] ** 0.5
        levels = _levels(operator.index(self.bits_of_keys), mixed.device)
        code = torch.bucketize(normal, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
        put(codes.keys, pack(code, self.bits_of_keys), slots, write_mask)
        put(codes.key_scale, norm.clamp(max=FP16).half(), slots, write_mask)

    def write_values(
        self, store: StageStore, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        codes: TurboQuantCodes = store.codes
        if values.shape[2] == 0 or codes.values.shape[2] == 0:
            return
        group = values.shape[-1] // codes.value_scale.shape[-1]
        for at in token_ranges(values.shape[2]):
            encoded = quantize(values[:, :, at].float(), self.bits_of_values, group)
            for target, data in zip(codes[2:], encoded, strict=True):
                put(target, data, slots[:, :, at], write_mask[:, :, at])

    def keys(self, store: StageStore, at: At) -> Tensor:
        return unmix(self._mixed_keys(store, at), self.seed)

    def values(self, store: StageStore, at: At) -> Tensor:
        codes: TurboQuantCodes = store.codes
        code, scale, zero = (take(t, at) for t in (codes.values, codes.value_scale, codes.value_zero))
        return dequantize(code, scale, zero, self.bits_of_values, self._value_width(codes))

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        """Products of mixed queries with the mixed key of every slot; see `Stage.score`."""
        assert rope is None, "keys are encoded as attention sees them"
        mixed = queries.float() @ mixing(queries.shape[-1], self.seed, queries.device).T
        codes: TurboQuantCodes = store.codes
        if is_fused(codes.keys, self.bits_of_keys, self._key_width(codes), store.page_slots):
            levels = _levels(operator.index(self.bits_of_keys), codes.keys.device)[None, None]
            words = as_words(codes.keys, self.bits_of_keys)
            scores = call(score_levels, words, levels, in_order_of_places(mixed, words), bits=self.bits_of_keys)
            return scores * (widen(codes.key_scale) * self._key_width(codes) ** -0.5).mT
        return score_by_chunks(self._mixed_keys, store, mixed.to(queries.dtype), None, store.codes.keys.shape[2])

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        codes: TurboQuantCodes = store.codes
        if is_fused(codes.values, self.bits_of_values, self._value_width(codes), store.page_slots):
            return mix_fused(codes.values, codes.value_scale, codes.value_zero, weights, self.bits_of_values)
        return mix_by_chunks(self.values, store, weights)

    def _key_width(self, codes: TurboQuantCodes) -> int:
        """Channels of a key; their codes fill whole bytes."""
        return codes.keys.shape[-1] * 8 // self.bits_of_keys

    def _value_width(self, codes: TurboQuantCodes) -> int:
        """Channels of a value; their codes fill whole bytes."""
        return codes.values.shape[-1] * 8 // self.bits_of_values

    def _mixed_keys(self, store: StageStore, at: At) -> Tensor:
        codes: TurboQuantCodes = store.codes
        width = self._key_width(codes)
        code = unpack(take(codes.keys, at), self.bits_of_keys, width)
        levels = _levels(operator.index(self.bits_of_keys), codes.keys.device)
        return levels[code.int()] * (take(codes.key_scale, at).float() * width**-0.5)


def _norm(x: Tensor) -> Tensor:
    """Euclidean norm of the last dimension, [..., 1]."""
    # Summed pairwise in an order that does not depend on the other dimensions, unlike that of a reduction. If the
    # length is odd, the last element is added to the first.
    square = x.square()
    while square.shape[-1] > 1:
        half = square.shape[-1] // 2
        halves = square[..., :half] + square[..., half : 2 * half]
        is_odd = square.shape[-1] % 2
        square = torch.cat((halves[..., :1] + square[..., -1:], halves[..., 1:]), -1) if is_odd else halves
    return square.sqrt()


@constant_result
def _levels(bits: int, device: torch.device) -> Tensor:
    """`normal_levels` as fp32."""
    return constant(
        ("normal levels", bits), device, lambda: torch.tensor(normal_levels(bits), dtype=torch.float32, device="cpu")
    )


@cache
def normal_levels(bits: int) -> tuple[float, ...]:
    """The 2^bits levels that quantize a normal distribution with the least mean squared error.

    Each level is the mean of the numbers nearest to it (Lloyd 1982, Max 1960).

    Args:
        bits: 1 to 4.

    Returns:
        The levels in ascending order, symmetric about 0.

    >>> [round(level, 3) for level in normal_levels(2)]
    [-1.51, -0.453, 0.453, 1.51]
    """
    count = 2 ** (bits - 1)
    levels = [3 * (i + 0.5) / count for i in range(count)]  # the positive half
    for _ in range(20_000):
        edges = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
        means = [_mean(low, high) for low, high in pairwise(edges)]
        change = max(abs(a - b) for a, b in zip(levels, means, strict=True))
        levels = means
        if change < 1e-12:
            break
    return (*(-level for level in reversed(levels)), *levels)


def _mean(low: float, high: float) -> float:
    """The mean of a standard normal distribution between `low` and `high`."""
    density = math.exp(-low * low / 2) - math.exp(-high * high / 2)
    # By `erfc`, because in the tail, where `erf` is nearly 1, the difference of two `erf` would cancel.
    mass = math.erfc(low / math.sqrt(2)) - math.erfc(high / math.sqrt(2))
    return density * math.sqrt(2 / math.pi) / mass
