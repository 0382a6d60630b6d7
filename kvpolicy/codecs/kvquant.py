"""Few levels where numbers are dense: keys by calibrated channels, values by token, outliers as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs import _files
from kvpolicy.codecs._common import check_least, mix_by_chunks, ordinary_layout, put, score_by_chunks, take
from kvpolicy.codecs._outliers import index_dtype, largest
from kvpolicy.codecs.packing import pack, packed_width, round_to_half, unpack
from kvpolicy.protocols import ALL_HEADS, At, Layout, ModelInfo, RotaryView, Stage, StageStore, Traits
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.validation import check_fields

_FP16 = torch.finfo(torch.float16).max


class KVQuantBook(NamedTuple):
    """What is calibrated of one layer; 1 stands for H where all heads share it.

    Attributes:
        key_offset: The middle of each key channel, [1, H, 1, D] fp32.
        key_range: Half the width of each key channel, [1, H, 1, D] fp32.
        key_levels: Levels of a normalised key, ascending, [2^bits] fp32.
        key_read: What each of them is read as, [2^bits] fp32.
        value_levels: [2^bits] fp32.
        value_read: [2^bits] fp32.
    """

    key_offset: Tensor
    key_range: Tensor
    key_levels: Tensor
    key_read: Tensor
    value_levels: Tensor
    value_read: Tensor


class KVQuantCodes(NamedTuple):
    """What KVQuant stores of one layer; D' is the bytes of D codes, k the outliers of a vector.

    Attributes:
        keys: Key codes, [B, H, C, D'] uint8.
        key_places: The channel of each outlier, [B, H, C, k] uint8 or int16.
        key_outliers: [B, H, C, k] fp16.
        values: Value codes, [B, H, C, D'] uint8.
        value_scale: Half the width of a value, [B, H, C, 1] fp16.
        value_zero: The middle of a value, [B, H, C, 1] fp16.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class KVQuant:
    """Quantize to calibrated levels, keys before the rotary embedding.

    Before the rotary embedding a channel of keys keeps its range, so the range is calibrated, and a key's code depends
    on that key alone. A value is normalised by its own range. What is normalised goes to the nearest of 2^bits levels,
    which were fitted to the layer. The outliers of each vector and the first tokens stay exact.

    Args:
        bits: Bits per code: 2, 3 or 4.
        outliers: Share of a vector's numbers that are kept exact, rounded, and at least one; 0 for none. Below 1.
        sinks: How many of the prompt's first tokens stay exact.
        norm: Whether levels are read such that the numbers' mean and deviation are what they were (Q-Norm).
        residual_length: How many of the newest tokens always stay exact.
        block_size: Tokens that are coded at a time in decode.
        calibration: Folder of the calibration, or `tiny` for that of the embedded model.

    Examples:
        >>> KVQuant(sinks=4).layout(1000)
        Layout(exact=68, coded=(964,))

    Source: KVQuant (arXiv:2401.18079): keys by channel before the rotary embedding, levels that are not uniform,
    outliers apart, first tokens exact, Q-Norm. The paper is unverified in full; its code was read.
    Differences: outliers are a fixed number of every head's vector, so that shapes are fixed, not those beyond
    thresholds in the vector of all heads: of a key those that its calibrated ranges put farthest out, of a value those
    farthest from its median (the lower of two). They are stored with their channel, not in compressed rows or columns.
    A value's offset and range are fp16. The newest `residual_length` tokens, and up to a block more, stay exact; the
    paper codes each token at once. Q-Norm is on at any width (the paper: for 2 bits). Levels are fitted without Fisher
    information where the calibration had none. Numbers beyond fp16 are clipped to its range. A value whose numbers are
    all equal is its offset.
    """

    bits: Literal[2, 3, 4] = 3
    outliers: float = 0.01
    sinks: int = 5
    norm: bool = True
    residual_length: int = 32
    block_size: int = 32
    calibration: str = "tiny"

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_fields(self)
        if self.bits not in (2, 3, 4):
            raise KVPolicyError(f"KVQuant's bits is {self.bits!r}: give 2, 3 or 4.")
        if not 0 <= self.outliers < 1:
            raise KVPolicyError(f"KVQuant's outliers is {self.outliers}: give a share from 0 to below 1, such as 0.01.")
        check_least(self, sinks=(0, 5), residual_length=(0, 32), block_size=(1, 32))
        if not self.calibration:
            raise KVPolicyError("KVQuant's calibration is empty: give a folder, or 'tiny' for the embedded model.")

    @property
    def traits(self) -> Traits:
        """Every token has a code of its own."""
        return Traits(
            block=self.block_size,
            residual=self.residual_length,
            key_space="unrotated",
            pins="first" if self.sinks else "none",
            pinned=self.sinks,
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """One."""
        return (self,)

    def layout(self, tokens: int) -> Layout:
        """Room for the first tokens, the residual and one block exact, and for all else coded."""
        return ordinary_layout(self.traits, tokens)

    def load_calibration(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> KVQuantBook:
        """A layer's calibrated ranges and levels."""
        offset, range_ = (self._calibrated(f"keys.{name}", layer_idx) for name in ("offset", "range"))
        key_levels, key_read = self._levels("keys", layer_idx)
        value_levels, value_read = self._levels("values", layer_idx)
        if offset.shape[0] > 1:  # else all heads share one
            offset, range_ = offset[heads], range_[heads]
        range_ = range_.clamp(min=1e-12)  # a channel that was constant
        calibration = KVQuantBook(
            offset[None, :, None], range_[None, :, None], key_levels, key_read, value_levels, value_read
        )
        return KVQuantBook(*(t.to(device) for t in calibration))

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError where the calibration is missing, lacks a layer or is of another model."""
        _files.check_model(_files.load(self.calibration, "kvquant"), self.calibration, model)
        for layer_idx in model.indices:
            shape = self.load_calibration(layer_idx, "cpu").key_offset.shape
            if shape[1] not in (1, model.heads) or shape[3] != model.head_dim:
                raise KVPolicyError(
                    f"The calibration {self.calibration!r} has {shape[1]} heads of {shape[3]} numbers, and the model "
                    f"{model.heads} of {model.head_dim}: run kvpolicy calibrate kvquant on this model."
                )

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> KVQuantCodes:
        """Empty codes for `slots` slots."""

        def zeros(width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, heads, slots, width, dtype=dtype, device=device)

        packed, apart = packed_width(head_dim, self.bits), outlier_count(self.outliers, head_dim)
        return KVQuantCodes(
            keys=zeros(packed, torch.uint8),
            key_places=zeros(apart, index_dtype(head_dim)),
            key_outliers=zeros(apart, torch.float16),
            values=zeros(packed, torch.uint8),
            value_scale=zeros(1, torch.float16),
            value_zero=zeros(1, torch.float16),
            value_places=zeros(apart, index_dtype(head_dim)),
            value_outliers=zeros(apart, torch.float16),
        )

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        """Encode tokens into slots, in place; see `Stage.write`."""
        codes: KVQuantCodes = store.codes
        calibration: KVQuantBook = store.calibration
        if keys.shape[2] == 0 or codes.keys.shape[2] == 0:
            return
        slots = slots.masked_fill(~write_mask, 0)
        keys, values = keys.float().clamp(-_FP16, _FP16), values.float().clamp(-_FP16, _FP16)
        count = codes.key_places.shape[-1]
        inner = (keys - calibration.key_offset) / calibration.key_range
        put(codes.keys, pack(nearest(inner, calibration.key_levels), self.bits), slots, write_mask)
        _put_outliers(codes.key_places, codes.key_outliers, keys, largest(inner.abs(), count), slots, write_mask)
        inner, scale, zero, places = normalise_values(values, count)
        put(codes.values, pack(nearest(inner, calibration.value_levels), self.bits), slots, write_mask)
        _put_outliers(codes.value_places, codes.value_outliers, values, places, slots, write_mask)
        put(codes.value_scale, scale.half(), slots, write_mask)
        put(codes.value_zero, zero.half(), slots, write_mask)

    def keys(self, store: StageStore, at: At) -> Tensor:
        """Keys of the slots `at` before the rotary embedding, [B, H, n, D] fp32."""
        codes: KVQuantCodes = store.codes
        calibration: KVQuantBook = store.calibration
        code = unpack(take(codes.keys, at), self.bits, calibration.key_offset.shape[-1])
        x = calibration.key_read[code.int()] * calibration.key_range + calibration.key_offset
        return x.scatter(-1, take(codes.key_places, at).long(), take(codes.key_outliers, at).float())

    def values(self, store: StageStore, at: At) -> Tensor:
        """Values of the slots `at`, [B, H, n, D] fp32."""
        codes: KVQuantCodes = store.codes
        calibration: KVQuantBook = store.calibration
        code = unpack(take(codes.values, at), self.bits, calibration.key_offset.shape[-1])
        x = (
            calibration.value_read[code.int()] * take(codes.value_scale, at).float()
            + take(codes.value_zero, at).float()
        )
        return x.scatter(-1, take(codes.value_places, at).long(), take(codes.value_outliers, at).float())

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        """Products of queries with every slot's key; see `Stage.score`."""
        return score_by_chunks(self.keys, store, queries, rope, store.codes.keys.shape[2])

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        """Every slot's value, weighted and summed; see `Stage.mix`."""
        return mix_by_chunks(self.values, store, weights)

    def _calibrated(self, name: str, layer_idx: int) -> Tensor:
        """A layer's calibrated tensor, fp32."""
        tensor = _files.load(self.calibration, "kvquant").tensors.get(f"{name}.{layer_idx}")
        if tensor is None:
            raise KVPolicyError(
                f"The calibration {self.calibration!r} has no {name} of layer {layer_idx}: run kvpolicy calibrate "
                f"kvquant on this model, for {self.bits} bits."
            )
        return tensor.float()

    def _levels(self, side: str, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Levels, ascending, and what they are read as."""
        levels = self._calibrated(f"{side}.levels.b{self.bits}", layer_idx).sort().values
        if not self.norm:
            return levels, levels
        scale, shift = self._calibrated(f"{side}.norm.b{self.bits}", layer_idx)
        return levels, levels * scale + shift


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """Which of the ascending `levels` is nearest to each number, uint8; of two as near, the lower.

    >>> nearest(torch.tensor([-3.0, 0.4, 0.5, 0.6]), torch.tensor([-1.0, 0.0, 1.0])).tolist()
    [0, 1, 1, 2]
    """
    return torch.bucketize(x.contiguous(), (levels[1:] + levels[:-1]) / 2).to(torch.uint8)


def normalise_values(values: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bring each value's numbers, but for its outliers, to -1 to 1.

    Args:
        values: [..., D] fp32, inside the range of fp16.
        count: How many numbers, those farthest from the median, are outliers.

    Returns:
        Normalised numbers [..., D], clipped; scale and zero [..., 1] fp32, as fp16 has them; where the outliers are,
        [..., count] int64.
    """
    middle = values.sort(-1).values[..., (values.shape[-1] - 1) // 2, None]
    places = largest((values - middle).abs(), count)
    apart = torch.zeros_like(values, dtype=torch.bool).scatter(-1, places, True)
    least = values.masked_fill(apart, torch.inf).amin(-1, keepdim=True)
    most = values.masked_fill(apart, -torch.inf).amax(-1, keepdim=True)
    scale, zero = round_to_half((most - least) / 2), round_to_half((most + least) / 2)
    inner = (values - zero) / scale.masked_fill(scale == 0, 1)
    return inner.clamp(-1, 1).masked_fill(scale == 0, 0), scale, zero, places


def outlier_count(share: float, head_dim: int) -> int:
    """How many numbers of a vector are kept; at least one, and one is always left.

    >>> outlier_count(0.01, 128), outlier_count(0.01, 256), outlier_count(0, 128)
    (1, 3, 0)
    """
    return min(max(1, round(share * head_dim)), head_dim - 1) if share else 0


def _put_outliers(places: Tensor, outliers: Tensor, x: Tensor, at: Tensor, slots: Tensor, write_mask: Tensor) -> None:
    """Write the numbers of `x` at the places `at` [B, H, n, k], and the places."""
    if at.shape[-1]:
        put(places, at.to(places.dtype), slots, write_mask)
        put(outliers, x.gather(-1, at).half(), slots, write_mask)
