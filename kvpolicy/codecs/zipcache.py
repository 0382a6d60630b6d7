"""ZipCache: more bits for salient tokens, decided again at regular intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs.buffer import buffer_sizes
from kvpolicy.codecs.common import mix_by_chunks, put, score_by_chunks, take
from kvpolicy.codecs.demotion import ByPriority
from kvpolicy.codecs.side_bits import SideBits
from kvpolicy.codecs.uniform import (
    FP16,
    channel_absmax,
    dequantize,
    freeze_scale,
    is_fused,
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
from kvpolicy.text.strategy import AutoInt, between, least, strategy


class ZipCacheCodes(NamedTuple):
    """The tensors of one stage of a layer; `D'` is the bytes of D packed codes.

    Attributes:
        keys: Codes of normalized keys, [B, H, C, D'] uint8.
        key_scale: [B, H, C, 1] fp16.
        key_zero: [B, H, C, 1] fp16.
        key_channel_scale: The divisor of each key channel, [B, H, 1, D] fp16.
        values: Codes of normalized values, [B, H, C, D'] uint8.
        value_scale: [B, H, C, 1] fp16.
        value_zero: [B, H, C, 1] fp16.
        value_channel_scale: The divisor of each value channel, [B, H, 1, D] fp16.
    """

    keys: Tensor
    key_scale: Tensor
    key_zero: Tensor
    key_channel_scale: Tensor
    values: Tensor
    value_scale: Tensor
    value_zero: Tensor
    value_channel_scale: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ZipCacheStage(Stage):
    """A stage of tokens of one precision.

    Args:
        bits: Bits per code of keys.
        value_bits: Bits per code of values; None for as many.
    """

    bits: int
    value_bits: int | None = None

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> ZipCacheCodes:

        def side(bits: int) -> tuple[Tensor, ...]:
            sizes = ((slots, packed_width(head_dim, bits)), (slots, 1), (slots, 1), (1, head_dim))
            dtypes = (torch.uint8, torch.float16, torch.float16, torch.float16)
            return tuple(
                torch.zeros(batch, heads, *size, dtype=dtype, device=device)
                for size, dtype in zip(sizes, dtypes, strict=True)
            )

        return ZipCacheCodes(*side(self.bits), *side(self._bits_of_values))

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        codes: ZipCacheCodes = store.codes
        if keys.shape[2] == 0 or codes.keys.shape[2] == 0:
            return
        sides = ((keys.float(), codes[:4], self.bits), (values.float(), codes[4:], self._bits_of_values))
        for x, targets, bits in sides:
            fitted = _channel_scale(channel_absmax(x, write_mask))
            channel_scale = freeze_scale(targets[3], fitted, write_mask, occupied)
            encoded = quantize(x / channel_scale.masked_fill(channel_scale == 0, 1), bits, x.shape[-1])
            for target, data in zip(targets[:3], encoded, strict=True):
                put(target, data, slots, write_mask)

    def keys(self, store: StageStore, at: At) -> Tensor:
        return _read(store.codes[:4], at, self.bits)

    def values(self, store: StageStore, at: At) -> Tensor:
        return _read(store.codes[4:], at, self._bits_of_values)

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        codes, scale, zero, channels = store.codes[:4]
        if rope is None and is_fused(codes, self.bits, queries.shape[-1]):
            return score_fused(codes, scale, zero, queries.float() * widen(channels), self.bits)
        return score_by_chunks(self.keys, store, queries, rope, codes.shape[2])

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        codes, scale, zero, channels = store.codes[4:]
        bits = self._bits_of_values
        if is_fused(codes, bits, channels.shape[-1]):
            return mix_fused(codes, scale, zero, weights, bits) * widen(channels)
        return mix_by_chunks(self.values, store, weights)

    @property
    def _bits_of_values(self) -> int:
        return self.value_bits or self.bits


def _read(parts: tuple[Tensor, ...], at: At, bits: int) -> Tensor:
    """The vectors that the codes of the slots `at` stand for, [B, H, n, D] fp32."""
    code, scale, zero = (take(part, at) for part in parts[:3])
    return dequantize(code, scale, zero, bits, parts[3].shape[-1]) * parts[3].float()


@strategy
class ZipCache(SideBits, Codec):
    """Quantize each token separately, with more bits for tokens of higher priority.

    Each channel is first divided by the square root of its largest absolute element, so that outlier channels do not
    stretch the range of a token. Then a token has one scale and one zero. New tokens stay in full precision until there
    are `recode_every` of them. Then all tokens are decoded, ranked and encoded again, those of highest priority in more
    bits.

    This is only the codec. The selector of the policy determines which tokens are salient: the metric of ZipCache (the
    attention of probe queries, divided by the number of probes that can attend to the token) is the selector `probe`.

    Args:
        high: Fraction of the tokens in `high_bits`, in [0, 1].
        high_bits: Bits per code of these tokens: 4 or 8.
        bits: Bits per code of all other tokens: 2, 3 or 4.
        key_bits: Bits per code of the keys of these others; `auto`: `bits`.
        value_bits: Bits per code of their values; `auto`: `bits`.
        recode_every: The number of new tokens after which all tokens are encoded again, at least 1. `auto`: one for
            every 8 tokens of the budget, at least 1 and at most 100.

    Examples:
        >>> ZipCache().layout(1000)
        Layout(exact=100, coded=(600, 400))

    Source:
        ZipCache (arXiv:2405.14256), by its code; the paper was not read in full (unverified). The defaults are those of
        the demo in the authors' code, but for `recode_every`, which is 100 there. Differences:

        - A scale and zero belong to one token and one KV head (to all heads together in the paper), because heads may
          hold different tokens.
        - Keys are encoded like values (in the authors' code, each channel of a class has its minimum and maximum), so
          that the code of a token does not depend on other tokens.
        - Each class has its own channel divisors, fitted while it is empty and rounded to fp16; a channel of zeros is
          divided by 1.
        - New tokens wait in a full-precision buffer.
    """

    high: float = between(0, 1, 0.6)
    high_bits: Literal[4, 8] = 4
    bits: Literal[2, 3, 4] = 2
    key_bits: Literal[2, 3, 4, "auto"] = "auto"
    value_bits: Literal[2, 3, 4, "auto"] = "auto"
    recode_every: AutoInt = least(1, "auto")

    @property
    def traits(self) -> Traits:
        """All tokens are encoded again whenever the full-precision buffer is full."""
        return self.traits_for(None)

    def traits_for(self, tokens: int | None) -> Traits:
        sizes = buffer_sizes(tokens, residual=0, block=self.recode_every, largest_block=100, tokens_per_slot=8)
        return Traits(block=sizes.block, demotion=ByPriority(recodes=True))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """One stage of salient tokens and one of all others."""
        return (
            ZipCacheStage(bits=self.high_bits),
            ZipCacheStage(bits=self.bits_of_keys, value_bits=self.bits_of_values),
        )

    def layout(self, tokens: int) -> Layout:
        """Full-precision slots for the new tokens of one period, and encoded slots for all tokens."""
        exact = self.traits_for(tokens).block
        if tokens < exact:
            return Layout(tokens)
        high = math.ceil(self.high * tokens - 1e-6)  # in floating point, 0.07 * 100 is slightly more than 7
        return Layout(exact, (high, tokens - high))


def _channel_scale(absmax: Tensor) -> Tensor:
    """The square root of each channel's largest absolute element, 1 if that is 0; a positive finite number of fp16."""
    root = absmax.masked_fill(absmax == 0, 1).sqrt()
    return round_to_half(root.clamp(torch.finfo(torch.float16).tiny, FP16))
