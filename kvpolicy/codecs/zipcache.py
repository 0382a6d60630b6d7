"""Few bits per number, more of them for salient tokens, decided anew every hundred tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs._common import check_least, mix_by_chunks, put, score_by_chunks, take
from kvpolicy.codecs._uniform import FP16, dequantize, largest_size, quantize, settle
from kvpolicy.codecs.packing import packed_width, round_to_half
from kvpolicy.protocols import ALL_HEADS, At, Calibration, Layout, ModelInfo, RotaryView, Stage, StageStore, Traits
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.validation import check_fields


class ZipCacheCodes(NamedTuple):
    """What ZipCache stores of one precision of a layer; `D'` is the bytes of D packed codes.

    Attributes:
        keys: Codes of normalised keys, [B, H, C, D'] uint8.
        key_scale: [B, H, C, 1] fp16.
        key_zero: [B, H, C, 1] fp16.
        key_channel_scale: What each channel of a key is divided by, [B, H, 1, D] fp16.
        values: Codes of normalised values, [B, H, C, D'] uint8.
        value_scale: [B, H, C, 1] fp16.
        value_zero: [B, H, C, 1] fp16.
        value_channel_scale: What each channel of a value is divided by, [B, H, 1, D] fp16.
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
class ZipCacheStage:
    """Tokens of one precision.

    Args:
        bits: Bits per code.
    """

    bits: int

    def load_calibration(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> Calibration:
        """Nothing is calibrated."""
        return ()

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> ZipCacheCodes:
        """Empty codes for `slots` slots."""

        def side() -> tuple[Tensor, ...]:
            sizes = ((slots, packed_width(head_dim, self.bits)), (slots, 1), (slots, 1), (1, head_dim))
            dtypes = (torch.uint8, torch.float16, torch.float16, torch.float16)
            return tuple(
                torch.zeros(batch, heads, *size, dtype=dtype, device=device)
                for size, dtype in zip(sizes, dtypes, strict=True)
            )

        return ZipCacheCodes(*side(), *side())

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        """Encode tokens into slots, in place; see `Stage.write`."""
        codes: ZipCacheCodes = store.codes
        if keys.shape[2] == 0 or codes.keys.shape[2] == 0:
            return
        for x, targets in ((keys.float(), codes[:4]), (values.float(), codes[4:])):
            channel = settle(targets[3], _channel(largest_size(x, write_mask)), write_mask, occupied)
            parts = quantize(x / channel.masked_fill(channel == 0, 1), self.bits, x.shape[-1])
            for target, part in zip(targets[:3], parts, strict=True):
                put(target, part, slots, write_mask)

    def keys(self, store: StageStore, at: At) -> Tensor:
        """Keys of the slots `at`, [B, H, n, D] fp32."""
        return self._read(store.codes[:4], at)

    def values(self, store: StageStore, at: At) -> Tensor:
        """Values of the slots `at`, [B, H, n, D] fp32."""
        return self._read(store.codes[4:], at)

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        """Products of queries with every slot's key; see `Stage.score`."""
        return score_by_chunks(self.keys, store, queries, rope, store.codes.keys.shape[2])

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        """Every slot's value, weighted and summed; see `Stage.mix`."""
        return mix_by_chunks(self.values, store, weights)

    def _read(self, parts: tuple[Tensor, ...], at: At) -> Tensor:
        code, scale, zero = (take(part, at) for part in parts[:3])
        return dequantize(code, scale, zero, self.bits, parts[3].shape[-1]) * parts[3].float()


@dataclass(frozen=True, kw_only=True, slots=True)
class ZipCache:
    """Quantize each token on its own, in more bits where the selector rates it higher.

    Each channel is first divided by the root of its largest number, so that channels of outliers do not stretch a
    token's range; then a token has one scale and one zero. The newest tokens stay exact until there are `recode_every`
    of them; then all tokens are decoded, rated and coded anew, those rated highest in more bits.

    This is the codec alone. What makes a token salient is up to the policy's selector: ZipCache's own measure (the
    attention of some probe queries, divided by how many of them can see the token) is the selector `probe`.

    Args:
        high: Share of the tokens that gets `high_bits`, 0 to 1.
        high_bits: Bits per code of those: 4 or 8.
        bits: Bits per code of all others: 2, 3 or 4.
        recode_every: After how many new tokens all are coded anew, at least 1.

    Examples:
        >>> ZipCache().layout(1000)
        Layout(exact=100, coded=(600, 400))

    Source: ZipCache (arXiv:2405.14256), by its code; the paper was not read in full (unverified). Shares, bits and
    period are those of the code's demo.
    Differences: a scale and zero are of one token and one KV head (of all heads together in the paper), because heads
    may hold different tokens. Keys are coded as values are (the code gives each channel of a class its minimum and
    maximum), so that a token's slot does not depend on other tokens. Each class has its own channel divisors, fitted
    where it is empty and rounded to fp16; a channel of zeros is divided by 1. New tokens join in an exact part.
    """

    high: float = 0.6
    high_bits: Literal[4, 8] = 4
    bits: Literal[2, 3, 4] = 2
    recode_every: int = 100

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_fields(self)
        if not 0 <= self.high <= 1:
            raise KVPolicyError(f"ZipCache's high is {self.high}: give a share from 0 to 1, such as 0.6.")
        if self.high_bits not in (4, 8):
            raise KVPolicyError(f"ZipCache's high_bits is {self.high_bits!r}: give 4 or 8.")
        if self.bits not in (2, 3, 4):
            raise KVPolicyError(f"ZipCache's bits is {self.bits!r}: give 2, 3 or 4.")
        check_least(self, recode_every=(1, 100))

    @property
    def traits(self) -> Traits:
        """All tokens are coded anew whenever the exact part is full."""
        return Traits(block=self.recode_every, demote_by="priority", recode_all=True)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Salient tokens, and all others."""
        return (ZipCacheStage(bits=self.high_bits), ZipCacheStage(bits=self.bits))

    def layout(self, tokens: int) -> Layout:
        """Room for the new tokens of one period, and for all tokens coded."""
        if tokens < self.recode_every:
            return Layout(tokens)
        high = math.ceil(self.high * tokens - 1e-6)  # 0.07 * 100 is a little more than 7
        return Layout(self.recode_every, (high, tokens - high))

    def check(self, model: ModelInfo) -> None:
        """Every model's vectors can be coded."""


def _channel(largest: Tensor) -> Tensor:
    """The root of each channel's largest number, 1 where that is 0; its fp16 is exact and never 0 or infinite."""
    root = largest.masked_fill(largest == 0, 1).sqrt()
    return round_to_half(root.clamp(torch.finfo(torch.float16).tiny, FP16))
