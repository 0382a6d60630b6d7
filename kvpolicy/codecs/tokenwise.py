"""Few bits per number, each token by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs._common import check_least, is_fresh, mix_by_chunks, ordinary_layout, put, score_by_chunks, take
from kvpolicy.codecs._uniform import FP16, dequantize, largest_divisor, quantize
from kvpolicy.codecs.packing import packed_width, round_to_half
from kvpolicy.protocols import ALL_HEADS, At, Calibration, Layout, ModelInfo, RotaryView, Stage, StageStore, Traits
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.validation import check_fields

_E4M3 = 448.0
"""The largest number of 8 bits of which 4 are an exponent and 3 a mantissa."""


class TokenWiseCodes(NamedTuple):
    """What TokenWise stores of one layer; `D'` is the bytes of D codes, `g` the channels of a group.

    Attributes:
        keys: Codes of normalised keys, [B, H, C, D'] uint8.
        key_scale: [B, H, C, D / g] fp16.
        key_zero: [B, H, C, D / g] fp16; without width for fp8.
        channel_scale: Deviation of each key channel, [B, H, 1, D] fp16; without slots where nothing is normalised.
        channel_zero: Mean of each key channel, like `channel_scale`.
        values: Value codes, [B, H, C, D'] uint8.
        value_scale: [B, H, C, D / g] fp16.
        value_zero: [B, H, C, D / g] fp16; without width for fp8.
    """

    keys: Tensor
    key_scale: Tensor
    key_zero: Tensor
    channel_scale: Tensor
    channel_zero: Tensor
    values: Tensor
    value_scale: Tensor
    value_zero: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWise:
    """Quantize each token by itself, after each key channel is brought to one range.

    A group is some channels of one token of one head, with a scale and a zero in fp16. So any slot can be used again
    at no loss, which suits selectors that evict token by token. Keys have channels of outliers, which would spoil
    every group: so each key channel's mean is taken away and its deviation divided out first. Both are found in the
    first tokens that a head codes, and stay until all of its coded tokens are gone. A token is stored in 4.25 bits per
    number at `bits=4` with groups of 128.

    Args:
        bits: Bits per code: 2, 3, 4 or 8, or `fp8`: floating point with 4 bits of exponent and 3 of mantissa (e4m3)
            and a scale without a zero.
        group_size: The most channels of a group (a group is the largest divisor of the head dimension not above it).
        residual_length: How many of the newest tokens always stay exact.
        block_size: How many tokens are coded at a time.
        normalize: Whether key channels are brought to one range.

    Raises:
        KVPolicyError: Where a parameter is out of its range.

    Examples:
        >>> TokenWise(bits=4).layout(1000)
        Layout(exact=64, coded=(968,))

    Source: our own composition, not a paper's. Scale and zero by token and group are what inference engines call
    per-token quantization; the mean and deviation by channel take the place of KIVI's (arXiv:2402.02750) key groups
    along tokens. ZipCache (2024) divides channels by the root of their largest number instead (as a specification
    tells; unverified).
    Differences: mean and deviation come from the prompt, not from calibration. The deviation is 1 where a channel does
    not vary, and never less than the error of its mean in fp16. Values are not normalised. A group whose numbers are
    all equal has the code 0, so it is exact but for the rounding of its zero. In fp8 a group of numbers that are all
    below 448 times the least of fp16 is 0.
    """

    bits: Literal[2, 3, 4, 8, "fp8"] = 4
    group_size: int = 128
    residual_length: int = 32
    block_size: int = 32
    normalize: bool = True

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_fields(self)
        if self.bits not in (2, 3, 4, 8, "fp8"):
            raise KVPolicyError(f"TokenWise's bits is {self.bits!r}: give 2, 3, 4, 8 or fp8.")
        check_least(self, group_size=(1, 128), residual_length=(0, 32), block_size=(1, 32))

    @property
    def traits(self) -> Traits:
        """A block is coded at a time, and slots share nothing but what is fixed per head."""
        return Traits(block=self.block_size, residual=self.residual_length)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """One."""
        return (self,)

    def layout(self, tokens: int) -> Layout:
        """Room for the residual and one block exact, and for all else coded."""
        return ordinary_layout(self.traits, tokens)

    def load_calibration(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> Calibration:
        """Nothing is calibrated."""
        return ()

    def check(self, model: ModelInfo) -> None:
        """Any vector will do."""

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> TokenWiseCodes:
        """Empty codes for `slots` slots."""

        def zeros(count: int, width: int, dtype: torch.dtype = torch.float16) -> Tensor:
            return torch.zeros(batch, heads, count, width, dtype=dtype, device=device)

        packed, parts = packed_width(head_dim, self._width()), head_dim // largest_divisor(head_dim, self.group_size)
        zero_parts, normalisers = 0 if self.bits == "fp8" else parts, int(self.normalize)
        return TokenWiseCodes(
            zeros(slots, packed, torch.uint8),
            zeros(slots, parts),
            zeros(slots, zero_parts),
            zeros(normalisers, head_dim),
            zeros(normalisers, head_dim),
            zeros(slots, packed, torch.uint8),
            zeros(slots, parts),
            zeros(slots, zero_parts),
        )

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        """Encode tokens into slots, in place; see `Stage.write`."""
        codes: TokenWiseCodes = store.codes
        if keys.shape[2] == 0 or codes.keys.shape[2] == 0:
            return
        keys = keys.float()
        if self.normalize:
            _fit(codes, keys, write_mask, occupied)
            keys = (keys - codes.channel_zero.float()) / codes.channel_scale.float()
        parts = codes.key_scale.shape[-1]
        coded = (*self._encode(keys, parts), *self._encode(values.float(), parts))
        targets = (codes.keys, codes.key_scale, codes.key_zero, codes.values, codes.value_scale, codes.value_zero)
        for target, data in zip(targets, coded, strict=True):
            if target.shape[-1]:
                put(target, data, slots, write_mask)

    def keys(self, store: StageStore, at: At) -> Tensor:
        """Keys of the slots `at`, [B, H, n, D] fp32."""
        codes: TokenWiseCodes = store.codes
        keys = self._decode(codes.keys, codes.key_scale, codes.key_zero, at, codes.channel_scale.shape[-1])
        return keys * codes.channel_scale.float() + codes.channel_zero.float() if self.normalize else keys

    def values(self, store: StageStore, at: At) -> Tensor:
        """Values of the slots `at`, [B, H, n, D] fp32."""
        codes: TokenWiseCodes = store.codes
        return self._decode(codes.values, codes.value_scale, codes.value_zero, at, codes.channel_scale.shape[-1])

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        """Products of queries with every slot's key; see `Stage.score`."""
        return score_by_chunks(self.keys, store, queries, rope, store.codes.keys.shape[2])

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        """Every slot's value, weighted and summed; see `Stage.mix`."""
        return mix_by_chunks(self.values, store, weights)

    def _width(self) -> int:
        """Bits of a code."""
        return 8 if self.bits == "fp8" else self.bits

    def _encode(self, x: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Packed codes, scales and zeros of `x` [B, H, n, D], in `parts` groups a token."""
        size = x.shape[-1] // parts
        if self.bits != "fp8":
            return quantize(x, self.bits, size)
        grouped = x.unflatten(-1, (parts, size))
        scale = round_to_half((grouped.abs().amax(-1, keepdim=True) / _E4M3).clamp(max=FP16))
        code = _to_e4m3(grouped / scale.masked_fill(scale == 0, 1)).flatten(-2)
        scale = scale.squeeze(-1).half()
        return code, scale, scale[..., :0]

    def _decode(self, codes: Tensor, scale: Tensor, zero: Tensor, at: At, head_dim: int) -> Tensor:
        codes, scale = take(codes, at), take(scale, at)
        if self.bits != "fp8":
            return dequantize(codes, scale, take(zero, at), self.bits, head_dim)
        return (_from_e4m3(codes).unflatten(-1, (scale.shape[-1], -1)) * scale.float()[..., None]).flatten(-2)


def _fit(codes: TokenWiseCodes, keys: Tensor, write_mask: Tensor, occupied: Tensor) -> None:
    """Find the mean and deviation of each channel anew, in heads that hold nothing and are given something.

    Sums are fp64, so that their order does not matter: a row must give the same codes with more padding.
    """
    used, count = write_mask[..., None], write_mask.sum(-1)[..., None, None].clamp(min=1)
    mean = (keys.masked_fill(~used, 0).sum(2, keepdim=True, dtype=torch.float64) / count).float()
    apart = (keys - mean).masked_fill(~used, 0)
    deviation = (apart.square().sum(2, keepdim=True, dtype=torch.float64) / count).sqrt().float()
    deviation = round_to_half(deviation.clamp(max=FP16))
    rounded = round_to_half(mean.clamp(-FP16, FP16))
    # Divided by less than this, the error of the mean alone would be the largest number of its group.
    deviation = torch.where(deviation == 0, 1, deviation).maximum((mean - rounded).abs().clamp(max=FP16))
    fresh = is_fresh(write_mask, occupied)
    codes.channel_zero.copy_(torch.where(fresh, rounded.half(), codes.channel_zero))
    codes.channel_scale.copy_(torch.where(fresh, round_to_half(deviation).half(), codes.channel_scale))


def _to_e4m3(x: Tensor) -> Tensor:
    """Bytes of fp32 numbers in e4m3, to nearest, ties to even, and clamped; on bits, as older GPUs lack the type."""
    size = x.abs().clamp(max=_E4M3)
    raw = size.view(torch.int32)
    # Of the mantissa 20 bits fall, and the exponent's bias falls from 127 to 7.
    normal = ((raw + 0x7FFFF + ((raw >> 20) & 1)) >> 20) - (120 << 3)
    small = (size * 2.0**9).round().int()
    return (torch.where(size < 2.0**-6, small, normal) | (x < 0).int() << 7).to(torch.uint8)


def _from_e4m3(code: Tensor) -> Tensor:
    """Undo `_to_e4m3`: with its sign apart, a code is the top of an fp16 number whose exponent has 8 more of bias."""
    raw = code.to(torch.int16)
    return (((raw & 0x80) << 8) | ((raw & 0x7F) << 7)).view(torch.float16).float() * 256
