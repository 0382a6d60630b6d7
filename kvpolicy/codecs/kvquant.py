"""KVQuant: calibrated non-uniform levels, keys per channel, values per token, outliers in full."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs import _files
from kvpolicy.codecs.buffer import buffer_sizes
from kvpolicy.codecs.common import SingleStage, add_rest, mix_by_chunks, put, score_by_chunks, take
from kvpolicy.codecs.outliers import index_dtype, largest
from kvpolicy.codecs.uniform import is_fused
from kvpolicy.kernels.compiled import call, widen_on_cpu
from kvpolicy.kernels.fused_elements import UNROLLED, decode_levels, mix_levels
from kvpolicy.kernels.fused_read import in_blocks
from kvpolicy.kernels.packing import pack, packed_width, round_to_half, unpack
from kvpolicy.kernels.words import as_words, in_order_of_channels
from kvpolicy.protocols import ALL_HEADS, At, ModelInfo, RotaryView, StageStore, Traits
from kvpolicy.text.strategy import AutoInt, least, strategy, tiny_or, where

_FP16 = torch.finfo(torch.float16).max


class KVQuantCalibration(NamedTuple):
    """The calibrated tensors of one layer; H is 1 if all heads share them.

    Attributes:
        key_offset: The middle of the range of each key channel, [1, H, 1, D] fp32.
        key_range: Half the width of the range of each key channel, [1, H, 1, D] fp32.
        key_levels: Levels to encode a normalized key with, ascending, [2^bits] fp32.
        key_decoded: The number that each level is decoded to, [2^bits] fp32.
        value_levels: The same for values, [2^bits] fp32.
        value_decoded: The same for values, [2^bits] fp32.
    """

    key_offset: Tensor
    key_range: Tensor
    key_levels: Tensor
    key_decoded: Tensor
    value_levels: Tensor
    value_decoded: Tensor


class KVQuantCodes(NamedTuple):
    """The tensors of one layer; D' is the bytes of D codes, k the number of outliers of a vector.

    Attributes:
        keys: Key codes, [B, H, C, D'] uint8.
        key_places: The channel of each outlier, [B, H, C, k] uint8 or int16.
        key_outliers: [B, H, C, k] fp16.
        values: Value codes, [B, H, C, D'] uint8.
        value_scale: Half the width of the range of a value, [B, H, C, 1] fp16.
        value_zero: The middle of the range of a value, [B, H, C, 1] fp16.
        value_places: [B, H, C, k] uint8 or int16.
        value_outliers: [B, H, C, k] fp16.
    """

    keys: Tensor
    key_places: Tensor
    key_outliers: Tensor
    values: Tensor
    value_scale: Tensor
    value_zero: Tensor
    value_places: Tensor
    value_outliers: Tensor


@strategy
class KVQuant(SingleStage):
    """Quantize to calibrated levels, keys before the rotary embedding.

    Before the rotary embedding, the range of a key channel does not change along the tokens. So the range is
    calibrated, and the code of a key depends on that key alone. A value is normalized by its own range. Normalized
    elements are rounded to the nearest of 2^bits levels that were fitted to the layer. The outliers of each vector and
    the first tokens stay in full precision.

    Args:
        bits: Bits per code: 2, 3 or 4.
        outliers: Fraction of the elements of a vector that are stored in full, in [0, 1), rounded, and at least one; 0
            for none.
        sinks: How many of the first prompt tokens stay in full precision.
        norm: Whether decoding preserves the mean and standard deviation of the elements (Q-Norm).
        residual_length: How many of the newest tokens always stay in full precision. `auto`: one for every 32 tokens of
            the budget, less the block if `block_size` is `auto` too; at most 32.
        block_size: How many tokens are encoded at a time during decode. `auto`: one for every 32 tokens of the budget,
            at least 1 and at most 32.
        calibration: Folder of the calibration, or the name of an embedded model, `tiny` or `tiny-4k`.

    Examples:
        >>> KVQuant(sinks=4).layout(1000)
        Layout(exact=35, coded=(996,))

    Source:
        KVQuant (arXiv:2401.18079): keys per channel before the rotary embedding, non-uniform levels, separate outliers,
        first tokens in full precision, Q-Norm. The paper is unverified in full; its code was read. Differences:

        - The vector of each head has a fixed number of outliers, so that shapes are fixed; in the paper they are the
          elements beyond thresholds in the vector of all heads.
        - The outliers of a key are those farthest out after normalization by the calibrated ranges, those of a value
          the farthest from its median (the lower of two). They are stored with their channel, not in compressed rows or
          columns.
        - Offset and range of a value are fp16. A value of equal elements is decoded to its offset. Elements beyond the
          range of fp16 are clipped.
        - The newest `residual_length` tokens, and up to a block more, stay in full precision; the paper encodes each
          token immediately.
        - Q-Norm is on at any width (the paper: for 2 bits).
        - Levels are fitted without Fisher information if the calibration had none.
    """

    bits: Literal[2, 3, 4] = 3
    outliers: float = where(lambda part: 0 <= part < 1, "at least 0 and less than 1", 0.01)
    sinks: int = least(0, 5)
    norm: bool = True
    residual_length: AutoInt = least(0, "auto")
    block_size: AutoInt = least(1, "auto")
    calibration: str = tiny_or("a folder")

    @property
    def traits(self) -> Traits:
        """The code of a token does not depend on other tokens."""
        return self.traits_for(None)

    def traits_for(self, tokens: int | None) -> Traits:
        residual, block = buffer_sizes(tokens, residual=self.residual_length, block=self.block_size)
        return Traits(
            block=block,
            residual=residual,
            key_space="unrotated",
            pins="first" if self.sinks else "none",
            pinned=self.sinks,
        )

    def load_calibration(
        self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS
    ) -> KVQuantCalibration:
        """The calibrated ranges and levels of a layer."""
        offset, range_ = (self._calibrated(f"keys.{name}", layer_idx) for name in ("offset", "range"))
        key_levels, key_decoded = self._levels("keys", layer_idx)
        value_levels, value_decoded = self._levels("values", layer_idx)
        if offset.shape[0] > 1:  # otherwise all heads share them
            offset = offset[heads]
            range_ = range_[heads]
        range_ = range_.clamp(min=1e-12)  # the range of a constant channel is 0
        calibration = KVQuantCalibration(
            offset[None, :, None], range_[None, :, None], key_levels, key_decoded, value_levels, value_decoded
        )
        return KVQuantCalibration(*(t.to(device) for t in calibration))

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if the calibration is missing, lacks a layer or is of another model."""
        _files.check_model(_files.load(self.calibration, "kvquant"), self.calibration, model)
        for layer_idx in model.indices:
            shape = self.load_calibration(layer_idx, "cpu").key_offset.shape
            _files.check_heads(self.calibration, "kvquant", shape[1], shape[3], model)

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> KVQuantCodes:

        def zeros(width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, heads, slots, width, dtype=dtype, device=device)

        packed = packed_width(head_dim, self.bits)
        outliers = outlier_count(self.outliers, head_dim)
        return KVQuantCodes(
            keys=zeros(packed, torch.uint8),
            key_places=zeros(outliers, index_dtype(head_dim)),
            key_outliers=zeros(outliers, torch.float16),
            values=zeros(packed, torch.uint8),
            value_scale=zeros(1, torch.float16),
            value_zero=zeros(1, torch.float16),
            value_places=zeros(outliers, index_dtype(head_dim)),
            value_outliers=zeros(outliers, torch.float16),
        )

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        codes: KVQuantCodes = store.codes
        calibration: KVQuantCalibration = store.calibration
        if keys.shape[2] == 0 or codes.keys.shape[2] == 0:
            return
        # A masked token may have any slot, and in a head where nothing is written, `put` reads it. Slot 0 exists.
        slots = slots.masked_fill(~write_mask, 0)
        keys = keys.float().clamp(-_FP16, _FP16)
        values = values.float().clamp(-_FP16, _FP16)
        count = codes.key_places.shape[-1]
        normalized = (keys - calibration.key_offset) / calibration.key_range
        put(codes.keys, pack(nearest(normalized, calibration.key_levels), self.bits), slots, write_mask)
        # Normalized, since an element is an outlier with respect to the range of its channel.
        places = largest(normalized.abs(), count)
        _put_outliers(codes.key_places, codes.key_outliers, keys, places, slots, write_mask)
        normalized, scale, zero, places = normalize_values(values, count)
        put(codes.values, pack(nearest(normalized, calibration.value_levels), self.bits), slots, write_mask)
        _put_outliers(codes.value_places, codes.value_outliers, values, places, slots, write_mask)
        put(codes.value_scale, scale.half(), slots, write_mask)
        put(codes.value_zero, zero.half(), slots, write_mask)

    def keys(self, store: StageStore, at: At) -> Tensor:
        """Keys of the slots `at` before the rotary embedding, [B, H, n, D] fp32."""
        codes: KVQuantCodes = store.codes
        calibration: KVQuantCalibration = store.calibration
        if self._is_fused(codes.keys, calibration):
            key = take(codes.keys, at), calibration.key_decoded[None, None]
            bounds = calibration.key_range, calibration.key_offset
            outliers = (take(t, at).float() for t in (codes.key_places, codes.key_outliers))
            return call(decode_levels, *key, *bounds, *outliers, bits=self.bits)
        code = unpack(take(codes.keys, at), self.bits, calibration.key_offset.shape[-1])
        # Not `code` itself: as an index, a uint8 tensor would be a mask.
        x = calibration.key_decoded[code.int()] * calibration.key_range + calibration.key_offset
        return x.scatter(-1, take(codes.key_places, at).long(), take(codes.key_outliers, at).float())

    def values(self, store: StageStore, at: At) -> Tensor:
        codes: KVQuantCodes = store.codes
        calibration: KVQuantCalibration = store.calibration
        code = unpack(take(codes.values, at), self.bits, calibration.key_offset.shape[-1])
        scale = take(codes.value_scale, at).float()
        x = calibration.value_decoded[code.int()] * scale + take(codes.value_zero, at).float()
        return x.scatter(-1, take(codes.value_places, at).long(), take(codes.value_outliers, at).float())

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        return score_by_chunks(self.keys, store, queries, rope, store.codes.keys.shape[2])

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        codes: KVQuantCodes = store.codes
        calibration: KVQuantCalibration = store.calibration
        if not self._is_fused(codes.values, calibration):
            return mix_by_chunks(self.values, store, weights)
        levels = calibration.value_decoded[None, None]
        words = as_words(codes.values, self.bits, sums_slots=True)
        slots = [in_blocks(widen_on_cpu(t)) for t in codes[4:]]
        mixed = call(mix_levels, in_blocks(words), levels, *slots, in_blocks(weights.float(), 3), bits=self.bits)
        return add_rest(in_order_of_channels(mixed, words), lambda at: self.values(store, at), weights)

    def _is_fused(self, codes: Tensor, calibration: KVQuantCalibration) -> bool:
        """Whether codes are decoded in compiled loops: with few outliers, since all of them are unrolled."""
        width = calibration.key_offset.shape[-1]
        return outlier_count(self.outliers, width) <= UNROLLED and is_fused(codes, self.bits, width)

    def _calibrated(self, name: str, layer_idx: int) -> Tensor:
        """A calibrated tensor of a layer, fp32."""
        return _files.layer_tensor(self.calibration, "kvquant", name, layer_idx, f"{self.bits} bits").float()

    def _levels(self, side: str, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Levels, ascending, and the numbers that they are decoded to."""
        levels = self._calibrated(f"{side}.levels.b{self.bits}", layer_idx).sort().values
        if not self.norm:
            return levels, levels
        scale, shift = self._calibrated(f"{side}.norm.b{self.bits}", layer_idx)
        # Q-Norm changes what a code is decoded to, and not which level an element is rounded to.
        return levels, levels * scale + shift


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """The index of the level nearest to each number, uint8; ties go to the lower one. Levels are ascending.

    >>> nearest(torch.tensor([-3.0, 0.4, 0.5, 0.6]), torch.tensor([-1.0, 0.0, 1.0])).tolist()
    [0, 1, 1, 2]
    """
    return torch.bucketize(x.contiguous(), (levels[1:] + levels[:-1]) / 2).to(torch.uint8)


def normalize_values(values: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scale each value so that its elements, except for its outliers, span the range from -1 to 1.

    Args:
        values: [..., D] fp32, inside the range of fp16.
        count: The number of outliers, the elements farthest from the median.

    Returns:
        Normalized elements [..., D], clipped; scale and zero [..., 1] fp32, rounded to fp16; and the indices of the
        outliers, [..., count] int64.
    """
    # Distances are taken from the median, which outliers do not move as they would move the mean.
    median = values.sort(-1).values[..., (values.shape[-1] - 1) // 2, None]
    places = largest((values - median).abs(), count)
    is_outlier = torch.zeros_like(values, dtype=torch.bool).scatter(-1, places, True)
    # Finite, because `outlier_count` leaves at least one element that is no outlier.
    least = values.masked_fill(is_outlier, torch.inf).amin(-1, keepdim=True)
    most = values.masked_fill(is_outlier, -torch.inf).amax(-1, keepdim=True)
    scale = round_to_half((most - least) / 2)
    zero = round_to_half((most + least) / 2)
    # With scale and zero as stored. Their rounding may put an element slightly outside -1 to 1.
    normalized = (values - zero) / scale.masked_fill(scale == 0, 1)
    return normalized.clamp(-1, 1).masked_fill(scale == 0, 0), scale, zero, places


def outlier_count(fraction: float, head_dim: int) -> int:
    """The number of outliers of a vector: at least one unless the fraction is 0, and never all of its elements.

    >>> outlier_count(0.01, 128), outlier_count(0.01, 256), outlier_count(0, 128)
    (1, 3, 0)
    """
    return min(max(1, round(fraction * head_dim)), head_dim - 1) if fraction else 0


def _put_outliers(places: Tensor, outliers: Tensor, x: Tensor, at: Tensor, slots: Tensor, write_mask: Tensor) -> None:
    """Write the elements of `x` at the indices `at` [B, H, n, k], and the indices."""
    if at.shape[-1]:
        put(places, at.to(places.dtype), slots, write_mask)
        put(outliers, x.gather(-1, at).half(), slots, write_mask)
