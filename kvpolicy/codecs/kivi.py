"""Few bits per number: keys by channel, values by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs._common import check_least, coarse, mix_by_chunks, ordinary_layout, put, score_by_chunks, take
from kvpolicy.codecs._uniform import codes_in, dequantize, frame, largest_divisor, quantize
from kvpolicy.codecs.packing import pack, unpack
from kvpolicy.protocols import ALL_HEADS, At, Calibration, Layout, ModelInfo, RotaryView, Stage, StageStore, Traits
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.validation import check_fields


class KIVICodes(NamedTuple):
    """What KIVI stores of one layer; `D'` is D * bits / 8, `g` the group size, `v` the channels of a value group.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class KIVI:
    """Quantize keys per channel and values per token, both in groups.

    Keys have channels of outliers, so a group of keys is one channel of `group_size` tokens. Values have none, so a
    group of values is some channels of one token. Each group has a scale and a zero in fp16. The newest tokens stay
    exact. A token is stored in 3 bits per number at `bits=2`, and 5 at `bits=4`, with groups of 32.

    Args:
        bits: Bits per code: 2, 4 or 8.
        group_size: Tokens of a key group, and the most channels of a value group (the largest divisor of the head
            dimension that is not above it).
        residual_length: How many of the newest tokens always stay exact.

    Examples:
        >>> KIVI(bits=4).layout(1000)
        Layout(exact=160, coded=(896,))

    Source: KIVI (arXiv:2402.02750), Section 3 and Algorithm 1; keys after the rotary embedding, as in its code.
    Differences: keys and values share one exact part of `residual_length` to `residual_length + group_size` tokens, so
    the newest keys are always exact (KIVI's own key part is empty after each flush). A group whose numbers are all
    equal has the code 0 (0/0 in the code). Where tokens are evicted, a new token takes a dead slot of a group and is
    coded with that group's scale and zero, clipped, until all of the group is dead.
    """

    bits: Literal[2, 4, 8] = 2
    group_size: int = 32
    residual_length: int = 128

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_fields(self)
        if self.bits not in (2, 4, 8):
            raise KVPolicyError(f"KIVI's bits is {self.bits!r}: give 2, 4 or 8.")
        check_least(self, group_size=(1, 32), residual_length=(0, 128))

    @property
    def traits(self) -> Traits:
        """A group of keys is coded at a time."""
        return Traits(block=self.group_size, group_size=self.group_size, residual=self.residual_length)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """One."""
        return (self,)

    def layout(self, tokens: int) -> Layout:
        """Room for the residual and one group exact, and whole groups coded."""
        return ordinary_layout(self.traits, tokens)

    def load_calibration(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> Calibration:
        """Nothing is calibrated."""
        return ()

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError where vectors do not fill whole bytes."""
        per_byte = 8 // self.bits
        if model.head_dim % per_byte:
            raise KVPolicyError(
                f"KIVI packs {per_byte} codes of {self.bits} bits into a byte, and the head dimension {model.head_dim} "
                f"is no multiple of {per_byte}: use bits=8."
            )

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> KIVICodes:
        """Empty codes for `slots` slots, a multiple of the group size."""
        assert slots % self.group_size == 0, "only whole groups can be coded"

        def zeros(count: int, width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, heads, count, width, dtype=dtype, device=device)

        packed, parts = head_dim * self.bits // 8, head_dim // largest_divisor(head_dim, self.group_size)
        groups = slots // self.group_size
        return KIVICodes(
            zeros(slots, packed, torch.uint8),
            zeros(groups, head_dim, torch.float16),
            zeros(groups, head_dim, torch.float16),
            zeros(slots, packed, torch.uint8),
            zeros(slots, parts, torch.float16),
            zeros(slots, parts, torch.float16),
        )

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        """Encode tokens into slots, in place; see `Stage.write`."""
        codes: KIVICodes = store.codes
        if keys.shape[2] == 0 or codes.keys.shape[2] == 0:
            return
        self._write_keys(codes, keys.float(), slots, write_mask, occupied)
        self._write_values(codes, values.float(), slots, write_mask)

    def keys(self, store: StageStore, at: At) -> Tensor:
        """Keys of the slots `at`, [B, H, n, D] fp32."""
        codes: KIVICodes = store.codes
        code, group = unpack(take(codes.keys, at), self.bits), coarse(at, self.group_size)
        scale, zero = take(codes.key_scale, group).float(), take(codes.key_zero, group).float()
        if isinstance(at, slice):
            grouped = code.unflatten(2, (-1, self.group_size))
            return (grouped * scale[:, :, :, None]).add_(zero[:, :, :, None]).flatten(2, 3)
        return (code * scale).add_(zero)

    def values(self, store: StageStore, at: At) -> Tensor:
        """Values of the slots `at`, [B, H, n, D] fp32."""
        codes: KIVICodes = store.codes
        code, scale, zero = (take(t, at) for t in (codes.values, codes.value_scale, codes.value_zero))
        return dequantize(code, scale, zero, self.bits, codes.key_scale.shape[-1])

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        """Products of queries with every slot's key; see `Stage.score`."""
        return score_by_chunks(self.keys, store, queries, rope, store.codes.keys.shape[2], self.group_size)

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        """Every slot's value, weighted and summed; see `Stage.mix`."""
        return mix_by_chunks(self.values, store, weights, self.group_size)

    def _write_keys(self, codes: KIVICodes, keys: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor) -> None:
        group = (slots // self.group_size)[..., None].expand_as(keys)  # [B, H, n, D]
        least, most = self._bounds(codes.key_zero, keys, group, write_mask)
        scale, zero = frame(least, most, self.bits)
        held = occupied.reshape(*least.shape[:3], self.group_size).any(-1, keepdim=True)
        frozen = held | (least > most)  # the latter where nothing is written
        codes.key_scale.copy_(torch.where(frozen, codes.key_scale, scale.half()))
        codes.key_zero.copy_(torch.where(frozen, codes.key_zero, zero.half()))
        scale, zero = codes.key_scale.float(), codes.key_zero.float()
        coded = codes_in(keys, scale.gather(2, group), zero.gather(2, group), self.bits)
        put(codes.keys, pack(coded, self.bits), slots, write_mask)

    def _write_values(self, codes: KIVICodes, values: Tensor, slots: Tensor, write_mask: Tensor) -> None:
        parts = quantize(values, self.bits, values.shape[-1] // codes.value_scale.shape[-1])
        for target, part in zip(codes[3:], parts, strict=True):
            put(target, part, slots, write_mask)

    def _bounds(self, like: Tensor, keys: Tensor, group: Tensor, write_mask: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the most that is written to each group and channel; least > most where nothing is."""
        inf = torch.full_like(like, torch.inf, dtype=torch.float32)
        used = write_mask[..., None]
        least = inf.scatter_reduce(2, group, keys.masked_fill(~used, torch.inf), "amin")
        most = (-inf).scatter_reduce(2, group, keys.masked_fill(~used, -torch.inf), "amax")
        return least, most
