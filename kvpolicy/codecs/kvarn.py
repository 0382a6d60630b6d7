"""KVarN: quantization after a Hadamard transform and a normalization of variances along tokens and channels."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs.blocks import Blocks, blocks_of
from kvpolicy.codecs.common import (
    ENCODED_AT_ONCE,
    TwoSides,
    mix_by_chunks,
    put,
    score_by_chunks,
    take,
    to_groups,
    token_ranges,
)
from kvpolicy.codecs.rotation import mix, mixing, unmix
from kvpolicy.codecs.token_groups import Parts, read_groups, score_groups, write_groups
from kvpolicy.codecs.uniform import dequantize, is_fused, mix_fused, quantize
from kvpolicy.kernels.balance import LOG_SCALE, balance, deviation
from kvpolicy.kernels.compiled import widen
from kvpolicy.kernels.packing import packed_width, round_to_half
from kvpolicy.kernels.slot_writes import gather_slots
from kvpolicy.protocols import At, RotaryView, StageStore, Traits
from kvpolicy.text.strategy import least, strategy


class KVarNCodes(NamedTuple):
    """The tensors of one layer; `D'` is the bytes of D codes of the side, `g` the group size.

    Attributes:
        keys: Codes of mixed, normalized keys, [B, H, C, D'] uint8.
        key_scale: Scale of each channel of a group, [B, H, C / g, D] fp16.
        key_zero: [B, H, C / g, D] fp16.
        key_token_scale: What a key was divided by, [B, H, C, 1] fp16.
        key_unit: What a later key of a group is divided by where its deviation is one step, [B, H, C / g, 1] fp32.
        values: Codes of mixed, normalized values, [B, H, C, D'] uint8.
        value_scale: Scale of each token, [B, H, C, 1] fp16.
        value_zero: [B, H, C, 1] fp16.
        value_channel_scale: What each channel of the values of a group was divided by, [B, H, C / g, D] fp16.
    """

    keys: Tensor
    key_scale: Tensor
    key_zero: Tensor
    key_token_scale: Tensor
    key_unit: Tensor
    values: Tensor
    value_scale: Tensor
    value_zero: Tensor
    value_channel_scale: Tensor


@strategy
class KVarN(TwoSides):
    """Quantize groups of tokens whose tokens and channels were given equal variances, after a Hadamard transform.

    The transform spreads outlier channels. What remains are tokens, and mixed channels, that are larger than others.
    The tokens of a group are divided by scales of tokens and scales of channels, which are found in turns, until all
    tokens and all channels have nearly the same standard deviation. Then each channel of keys has a scale and a zero
    for the tokens of the group, and each value has a scale and a zero for its channels. The first tokens stay in full
    precision, and so do the newest ones until they fill a group. An element of a head of 128 channels takes 3.38 bits:
    4 of keys and 2 of values, and their scales.

    Args:
        key_bits: Bits per code of keys: 2, 3 or 4.
        value_bits: Bits per code of values: 2, 3 or 4.
        group_size: Tokens per group.
        iterations: How often tokens and channels are divided by their deviations.
        sinks: How many of the first prompt tokens stay in full precision.
        residual_length: How many of the newest tokens always stay in full precision, besides those that fill no group.

    Examples:
        >>> KVarN().layout(1000)
        Layout(exact=256, coded=(896,))

    Source:
        KVarN (arXiv:2606.03458), by the authors' code, a fork of vLLM; the paper was not read in full (unverified). The
        defaults are those of its preset `kvarn_k4v2_g128`; the paper has 16 iterations, and the code 8. Differences:

        - A head dimension that is not a power of two is mixed by a Hadamard matrix and a cosine transform.
        - Codes are rounded with the scales and zeros as they are stored, in fp16; the authors' code rounds with those
          of fp32, and stores them then.
        - Deviations are computed in fp64, and imbalances that differ by less than a billionth are equal, so that the
          codes of a row do not depend on its batch.
        - The scale of a channel of keys, and that of a token of values, are not computed apart: they are a factor of
          the scale that its codes have in any case, which the authors multiply them into.
        - Under eviction, a new token takes the slot of an evicted one. Its key is encoded with the scales and zeros of
          the group, clipped, and its value with the scales of the channels, until the whole group is empty. The scale
          of the key is the one that a further round would give it.
        - A group that is not full, of one token at least, has the deviations of its own tokens; that of one token is 0.
        - There are no percentiles in place of the minimum and the maximum, which the authors' code has as a switch.
    """

    key_bits: Literal[2, 3, 4] = 4
    value_bits: Literal[2, 3, 4] = 2
    group_size: int = least(1, 128)
    iterations: int = least(1, 8)
    sinks: int = least(0, 128)
    residual_length: int = least(0, 0)

    @property
    def traits(self) -> Traits:
        """Tokens are encoded in blocks of one group; the first ones are pinned."""
        return Traits(
            block=self.group_size,
            group_size=self.group_size,
            residual=self.residual_length,
            pins="first" if self.sinks else "none",
            pinned=self.sinks,
        )

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> KVarNCodes:
        assert slots % self.group_size == 0, "only whole groups can be encoded"

        def zeros(count: int, width: int, dtype: torch.dtype = torch.float16) -> Tensor:
            return torch.zeros(batch, heads, count, width, dtype=dtype, device=device)

        groups = slots // self.group_size
        return KVarNCodes(
            keys=zeros(slots, packed_width(head_dim, self.key_bits), torch.uint8),
            key_scale=zeros(groups, head_dim),
            key_zero=zeros(groups, head_dim),
            key_token_scale=zeros(slots, 1),
            key_unit=zeros(groups, 1, torch.float32),
            values=zeros(slots, packed_width(head_dim, self.value_bits), torch.uint8),
            value_scale=zeros(slots, 1),
            value_zero=zeros(slots, 1),
            value_channel_scale=zeros(groups, head_dim),
        )

    def write_keys(self, store: StageStore, keys: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor) -> None:
        codes: KVarNCodes = store.codes
        if keys.shape[2] == 0 or codes.keys.shape[2] == 0:
            return
        mixed = mix(keys.float())
        blocks = blocks_of(slots, write_mask, occupied, self.group_size)
        grouped, is_written = blocks.gather(mixed)
        fitted = self._fit(grouped, is_written, tokens_first=True)[0].squeeze(-1)
        # Slots of a block that are not written are empty, and get a scale that is not read.
        of_blocks = codes.key_token_scale.view(*fitted.shape[:2], -1, self.group_size)
        put(of_blocks, fitted.half(), blocks.started, blocks.is_new)
        group = slots.div(self.group_size, rounding_mode="floor")
        own = gather_slots(codes.key_token_scale, slots).float()
        scale = torch.where(_is_new(blocks, slots), own, _later_scale(codes, mixed, group))
        put(codes.key_token_scale, scale.half(), slots, write_mask)
        write_groups(_key_parts(codes), mixed / scale, slots, write_mask, occupied, self.key_bits, self.group_size)
        steps = _deviation_in_steps(grouped, take(codes.key_scale, blocks.started)[:, :, :, None])
        count = is_written.double().sum((3, 4))[..., None]
        unit = (fitted.double()[..., None] * is_written).sum(3) / (steps * is_written).sum(3)
        put(codes.key_unit, unit.masked_fill((count == 0) | ~unit.isfinite(), 0).float(), blocks.started, blocks.is_new)

    def write_values(
        self, store: StageStore, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        codes: KVarNCodes = store.codes
        if values.shape[2] == 0 or codes.values.shape[2] == 0:
            return
        mixed = mix(values.float())
        blocks = blocks_of(slots, write_mask, occupied, self.group_size)
        fitted = self._fit(*blocks.gather(mixed), tokens_first=False)[1].squeeze(3)
        put(codes.value_channel_scale, fitted.half(), blocks.started, blocks.is_new)
        group = slots.div(self.group_size, rounding_mode="floor")
        for at in token_ranges(mixed.shape[2]):
            # Read back, since a token may also go to an older group, which keeps its scales.
            scale = gather_slots(codes.value_channel_scale, group[:, :, at]).float()
            encoded = quantize(mixed[:, :, at] / scale, self.value_bits, mixed.shape[-1])
            for target, data in zip(_value_parts(codes), encoded, strict=True):
                put(target, data, slots[:, :, at], write_mask[:, :, at])

    def keys(self, store: StageStore, at: At) -> Tensor:
        return unmix(self._mixed_keys(store, at))

    def values(self, store: StageStore, at: At) -> Tensor:
        return unmix(self._mixed_values(store, at))

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        """Products of mixed queries with the mixed key of every slot; see `Stage.score`."""
        assert rope is None, "keys are encoded as attention sees them"
        codes: KVarNCodes = store.codes
        mixed = queries.float() @ mixing(queries.shape[-1], None, queries.device).T
        if is_fused(codes.keys, self.key_bits, queries.shape[-1]):
            return score_groups(_key_parts(codes), mixed, self.key_bits) * widen(codes.key_token_scale).mT
        return score_by_chunks(
            self._mixed_keys, store, mixed.to(queries.dtype), None, codes.keys.shape[2], self.group_size
        )

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        """Weighted sum of the values of all slots, of which only the sum is unmixed; see `Stage.mix`."""
        codes: KVarNCodes = store.codes
        if not is_fused(codes.values, self.value_bits, codes.value_channel_scale.shape[-1]):
            return unmix(mix_by_chunks(self._mixed_values, store, weights, self.group_size))
        # The channels of each group have scales of their own. So groups are summed one by one, as rows of one head.
        rows = weights.shape[:2]
        code, scale, zero = (t.view(-1, 1, self.group_size, t.shape[-1]) for t in _value_parts(codes))
        of_groups = weights.unflatten(-1, (-1, self.group_size)).transpose(2, 3).flatten(0, 2)[:, None]
        sums = mix_fused(code, scale, zero, of_groups, self.value_bits).unflatten(0, (*rows, -1)).squeeze(3)
        return unmix((sums * widen(codes.value_channel_scale)[:, :, :, None]).sum(2))

    def _fit(self, grouped: Tensor, is_written: Tensor, *, tokens_first: bool) -> tuple[Tensor, Tensor]:
        """`balance` of some groups at a time, since it takes them to fp64; rounded to fp16."""
        count = max(ENCODED_AT_ONCE // self.group_size, 1)
        parts = zip(grouped.split(count, 2), is_written.split(count, 2), strict=True)
        found = [balance(x.double(), mask, self.iterations, tokens_first) for x, mask in parts]
        tokens, channels = (torch.cat(side, 2).float() for side in zip(*found, strict=True))
        return round_to_half(tokens), round_to_half(channels)

    def _mixed_keys(self, store: StageStore, at: At) -> Tensor:
        codes: KVarNCodes = store.codes
        normal = read_groups(_key_parts(codes), at, self.key_bits, self.group_size)
        return normal * take(codes.key_token_scale, at).float()

    def _mixed_values(self, store: StageStore, at: At) -> Tensor:
        codes: KVarNCodes = store.codes
        code, scale, zero = (take(t, at) for t in _value_parts(codes))
        normal = dequantize(code, scale, zero, self.value_bits, codes.value_channel_scale.shape[-1])
        channels = take(codes.value_channel_scale, to_groups(at, self.group_size)).float()
        if isinstance(at, slice):
            return (normal.unflatten(2, (-1, self.group_size)) * channels[:, :, :, None]).flatten(2, 3)
        return normal * channels


def _deviation_in_steps(x: Tensor, scale: Tensor) -> Tensor:
    """Standard deviation of tokens over their channels, each counted in steps of its scale, [..., 1] fp64.

    A channel without a scale counts as 0.
    """
    scale = scale.double()
    return deviation((x / scale.masked_fill(scale == 0, 1)).masked_fill(scale == 0, 0))


def _later_scale(codes: KVarNCodes, mixed: Tensor, group: Tensor) -> Tensor:
    """The scales of keys [B, H, n, D] that go to groups [B, H, n] with scales, [B, H, n, 1] fp32, rounded to fp16."""
    found: list[Tensor] = []
    low, high = (math.exp(bound) for bound in LOG_SCALE)
    for at in token_ranges(mixed.shape[2]):
        scale, unit = (gather_slots(t, group[:, :, at]) for t in (codes.key_scale, codes.key_unit))
        found.append((_deviation_in_steps(mixed[:, :, at], scale) * unit).clamp(low, high).float())
    return round_to_half(torch.cat(found, 2))


def _is_new(blocks: Blocks, slots: Tensor) -> Tensor:
    """Which slots [B, H, n] are in a block that the write starts, [B, H, n, 1]."""
    is_new = torch.cat((blocks.is_new, torch.zeros_like(blocks.is_new[..., :1])), -1)
    return is_new.gather(2, blocks.rows(slots))[..., None]


def _key_parts(codes: KVarNCodes) -> Parts:
    return codes.keys, codes.key_scale, codes.key_zero


def _value_parts(codes: KVarNCodes) -> Parts:
    return codes.values, codes.value_scale, codes.value_zero
