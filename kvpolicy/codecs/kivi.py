"""Few bits per number: keys by channel, values by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs.packing import pack, round_to_half, unpack
from kvpolicy.protocols import Layout

_FP16 = torch.finfo(torch.float16).max


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

    Example:
        >>> KIVI(bits=4).layout(1000)
        Layout(exact=160, coded=896)

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
        if self.bits not in (2, 4, 8):
            raise ValueError(f"KIVI's bits is {self.bits}: give 2, 4 or 8.")
        if self.group_size < 1:
            raise ValueError(f"KIVI's group_size is {self.group_size}: give at least 1, such as 32.")
        if self.residual_length < 0:
            raise ValueError(f"KIVI's residual_length is {self.residual_length}: give at least 0, such as 128.")

    @property
    def block(self) -> int:
        """A group of keys is coded at a time."""
        return self.group_size

    @property
    def residual(self) -> int:
        """The newest tokens that are never coded."""
        return self.residual_length

    def layout(self, tokens: int) -> Layout:
        """Room for the residual and one group exact, and whole groups coded."""
        exact = self.residual_length + self.group_size
        if tokens < exact:  # too few to ever fill a group
            return Layout(tokens, 0)
        return Layout(exact, -(-(tokens - self.residual_length) // self.group_size) * self.group_size)

    def check(self, head_dim: int) -> None:
        """Raise ValueError where vectors of `head_dim` do not fill whole bytes."""
        per_byte = 8 // self.bits
        if head_dim % per_byte:
            raise ValueError(
                f"KIVI packs {per_byte} codes of {self.bits} bits into a byte, and the head dimension {head_dim} is no "
                f"multiple of {per_byte}: use bits=8."
            )

    def alloc(self, batch: int, heads: int, coded: int, head_dim: int, device: torch.device | str) -> KIVICodes:
        """Empty codes for `coded` slots, a multiple of the group size."""
        assert coded % self.group_size == 0, "only whole groups can be coded"

        def zeros(slots: int, width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, heads, slots, width, dtype=dtype, device=device)

        packed, parts = head_dim * self.bits // 8, head_dim // self._channels(head_dim)
        groups = coded // self.group_size
        return KIVICodes(
            zeros(coded, packed, torch.uint8),
            zeros(groups, head_dim, torch.float16),
            zeros(groups, head_dim, torch.float16),
            zeros(coded, packed, torch.uint8),
            zeros(coded, parts, torch.float16),
            zeros(coded, parts, torch.float16),
        )

    def write(
        self, codes: KIVICodes, keys: Tensor, values: Tensor, slots: Tensor, active: Tensor, live: Tensor
    ) -> None:
        """Encode tokens into slots, in place; see `Codec.write`."""
        if keys.shape[2] == 0 or codes.keys.shape[2] == 0:
            return
        self._write_keys(codes, keys.float(), slots, active, live)
        self._write_values(codes, values.float(), slots, active)

    def read(self, codes: KIVICodes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of every coded slot, each [B, H, C, D]."""
        groups, parts = codes.key_scale.shape[2], codes.value_scale.shape[3]
        keys = unpack(codes.keys, self.bits)
        batch, heads, slots, dim = keys.shape
        keys = keys.view(batch, heads, groups, self.group_size, dim)
        keys = keys * codes.key_scale.float()[:, :, :, None] + codes.key_zero.float()[:, :, :, None]
        values = unpack(codes.values, self.bits).view(batch, heads, slots, parts, dim // parts)
        values = values * codes.value_scale.float()[..., None] + codes.value_zero.float()[..., None]
        return keys.flatten(2, 3).to(dtype), values.flatten(3).to(dtype)

    def _channels(self, head_dim: int) -> int:
        """Channels of a value group."""
        return max(size for size in range(1, min(self.group_size, head_dim) + 1) if head_dim % size == 0)

    def _write_keys(self, codes: KIVICodes, keys: Tensor, slots: Tensor, active: Tensor, live: Tensor) -> None:
        group = (slots // self.group_size)[..., None].expand_as(keys)  # [B, H, n, D]
        least, most = self._bounds(codes.key_zero, keys, group, active)
        scale, zero = self._scale(least, most)
        held = live.reshape(*least.shape[:3], self.group_size).any(-1, keepdim=True)
        frozen = held | (least > most)  # the latter where nothing is written
        codes.key_scale.copy_(torch.where(frozen, codes.key_scale, scale.half()))
        codes.key_zero.copy_(torch.where(frozen, codes.key_zero, zero.half()))
        scale, zero = codes.key_scale.float(), codes.key_zero.float()
        coded = self._quantize(keys, scale.gather(2, group), zero.gather(2, group))
        _put(codes.keys, pack(coded, self.bits), slots, active)

    def _write_values(self, codes: KIVICodes, values: Tensor, slots: Tensor, active: Tensor) -> None:
        grouped = values.reshape(*values.shape[:3], codes.value_scale.shape[3], -1)  # [B, H, n, D / v, v]
        scale, zero = self._scale(*torch.aminmax(grouped, dim=-1))
        coded = self._quantize(grouped, scale[..., None], zero[..., None]).flatten(-2)
        _put(codes.values, pack(coded, self.bits), slots, active)
        _put(codes.value_scale, scale.half(), slots, active)
        _put(codes.value_zero, zero.half(), slots, active)

    def _bounds(self, like: Tensor, keys: Tensor, group: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the most that is written to each group and channel; least > most where nothing is."""
        inf = torch.full_like(like, torch.inf, dtype=torch.float32)
        used = active[..., None]
        least = inf.scatter_reduce(2, group, keys.masked_fill(~used, torch.inf), "amin")
        most = (-inf).scatter_reduce(2, group, keys.masked_fill(~used, -torch.inf), "amax")
        return least, most

    def _scale(self, least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero, as fp16 has them; what is too large for it is clipped, so that nothing becomes infinite."""
        step = (most - least) / (2**self.bits - 1)
        return round_to_half(step.clamp(max=_FP16)), round_to_half(least.clamp(-_FP16, _FP16))

    def _quantize(self, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Codes, uint8, with the scale and zero that are stored."""
        flat = scale == 0
        code = (x - zero) / scale.masked_fill(flat, 1)
        return code.round().clamp(0, 2**self.bits - 1).masked_fill(flat, 0).to(torch.uint8)


def _put(store: Tensor, data: Tensor, slots: Tensor, active: Tensor) -> None:
    """Write `data` [B, H, n, W] into `store` [B, H, C, W] at `slots` where `active`.

    A scatter cannot skip a token, and an inactive one may point to a slot that is in use. So an inactive token
    repeats the write of its head's first active one; in a head without any, all rewrite what is there.
    """
    first = active.int().argmax(-1, keepdim=True)
    token = torch.where(active, torch.arange(active.shape[-1], device=active.device), first)
    index = slots.gather(-1, token)[..., None].expand_as(data)
    data = data.gather(2, token[..., None].expand_as(data))
    some = active.any(-1)[..., None, None]
    store.scatter_(2, index, torch.where(some, data, store.gather(2, index)))
