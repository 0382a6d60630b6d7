"""RotateKV: quantization after a Hadamard transform of the channels."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs.buffer import buffer_sizes
from kvpolicy.codecs.common import (
    SingleStage,
    is_empty_head,
    mix_by_chunks,
    put,
    score_by_chunks,
    take,
)
from kvpolicy.codecs.rotation import mix, mixing, unmix
from kvpolicy.codecs.side_bits import SideBits
from kvpolicy.codecs.uniform import FP16, is_fused, largest_divisor, mix_fused
from kvpolicy.kernels.compiled import call, widen
from kvpolicy.kernels.fused_read import decode_channel_groups
from kvpolicy.kernels.packing import pack, packed_width, round_to_half, unpack_float
from kvpolicy.protocols import At, ModelInfo, RotaryView, StageStore, Traits
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import AutoInt, between, least, strategy


class RotateCodes(NamedTuple):
    """The tensors of one layer; `D'` is the bytes of D packed codes, `g` the groups of a token.

    Attributes:
        keys: Codes of mixed, reordered keys, [B, H, C, D'] uint8.
        key_scale: [B, H, C, g] fp16.
        key_zero: The code of the number 0, [B, H, C, g] uint8.
        place: Position of each mixed channel of a key after sorting, [B, H, 1, D] int16; 0 and unused if `g` is 1.
        values: Codes of mixed values, [B, H, C, D'] uint8.
        value_scale: [B, H, C, g] fp16.
        value_zero: [B, H, C, g] uint8.
    """

    keys: Tensor
    key_scale: Tensor
    key_zero: Tensor
    place: Tensor
    values: Tensor
    value_scale: Tensor
    value_zero: Tensor


@strategy
class RotateKV(SideBits, SingleStage):
    """Quantize each token separately, after a Hadamard transform has spread its outliers over all channels.

    Keys are encoded without their rotary embedding. Their mixed channels are sorted by size, so that the channels of a
    group have similar ranges. A group has a scale in fp16 and a zero that is itself a code. Tokens with a massive
    activation, which become attention sinks, stay in full precision, and so do the newest tokens.

    Args:
        bits: Bits per code: 2, 3 or 4.
        key_bits: Bits per code of keys, which have outliers; `auto`: `bits`.
        value_bits: Bits per code of values; `auto`: `bits`.
        group_size: The maximum number of channels per group (which has the largest divisor of the head dimension up to
            it).
        sinks: The maximum number of tokens that stay in full precision for their massive activations.
        residual_length: How many of the newest tokens always stay in full precision. `auto`: one for every 32 tokens of
            the budget, less the block if `block_size` is `auto` too; at most 32.
        block_size: How many tokens are encoded at a time during decode. `auto`: one for every 32 tokens of the budget,
            at least 1 and at most 32.

    Examples:
        >>> RotateKV().layout(1000)
        Layout(exact=51, coded=(980,))

    Source:
        RotateKV (arXiv:2501.16383), by its code, which only simulates the codes; the paper was not read in full
        (unverified). Differences:

        - Every KV head is mixed separately (the authors' code mixes four together), because heads may hold different
          tokens.
        - A head dimension that is not a power of two is mixed by a Hadamard matrix and a cosine transform.
        - Nothing is folded into the weights of the model: values too are mixed and unmixed here.
        - The order of channels is fitted to the first tokens that are encoded in a head, and stays until all of its
          encoded tokens are gone (in the paper, it is calibrated); with one group, there is none.
        - The zero of a group is one byte, and 0 is always inside the range of a group. A group of equal elements is
          decoded without error, up to fp16.
        - There are 2^bits - 1 steps (the authors' code has bits^2 - 1, which is wrong at 3 bits).
        - The newest tokens stay in full precision, and tokens are encoded in blocks.
    """

    bits: Literal[2, 3, 4] = 2
    key_bits: Literal[2, 3, 4, "auto"] = "auto"
    value_bits: Literal[2, 3, 4, "auto"] = "auto"
    group_size: int = least(1, 128)
    sinks: int = between(0, 2**15 - 1, 20)
    residual_length: AutoInt = least(0, "auto")
    block_size: AutoInt = least(1, "auto")

    @property
    def traits(self) -> Traits:
        """The code of a token does not depend on other tokens; massive activations are pinned."""
        return self.traits_for(None)

    def traits_for(self, tokens: int | None) -> Traits:
        residual, block = buffer_sizes(tokens, residual=self.residual_length, block=self.block_size)
        return Traits(
            block=block,
            residual=residual,
            key_space="unrotated",
            pins="massive",
            pinned=self.sinks,
        )

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if the order of the channels does not fit int16."""
        if model.head_dim >= 2**15:
            raise KVPolicyError(
                f"The head dimension must be less than {2**15} for RotateKV, got {model.head_dim}; try KIVI."
            )

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> RotateCodes:

        def zeros(count: int, width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, heads, count, width, dtype=dtype, device=device)

        groups = head_dim // largest_divisor(head_dim, self.group_size)
        return RotateCodes(
            keys=zeros(slots, packed_width(head_dim, self.bits_of_keys), torch.uint8),
            key_scale=zeros(slots, groups, torch.float16),
            key_zero=zeros(slots, groups, torch.uint8),
            place=zeros(1, head_dim, torch.int16),
            values=zeros(slots, packed_width(head_dim, self.bits_of_values), torch.uint8),
            value_scale=zeros(slots, groups, torch.float16),
            value_zero=zeros(slots, groups, torch.uint8),
        )

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        codes: RotateCodes = store.codes
        if keys.shape[2] == 0 or codes.keys.shape[2] == 0:
            return
        mixed = mix(keys.float())
        # With one group, the order of the channels has no effect.
        if codes.key_scale.shape[-1] > 1:
            is_fitted = is_empty_head(write_mask, occupied)
            codes.place.copy_(torch.where(is_fitted, _places(mixed, write_mask), codes.place))
            order = codes.place.argsort(-1).expand_as(mixed)
            mixed = mixed.gather(-1, order)
        targets = (codes.keys, codes.key_scale, codes.key_zero)
        _put(targets, mixed, slots, write_mask, self.bits_of_keys)
        targets = (codes.values, codes.value_scale, codes.value_zero)
        _put(targets, mix(values.float()), slots, write_mask, self.bits_of_values)

    def keys(self, store: StageStore, at: At) -> Tensor:
        """Keys of the slots `at` before the rotary embedding, [B, H, n, D] fp32."""
        return unmix(self._mixed_keys(store, at))

    def values(self, store: StageStore, at: At) -> Tensor:
        return unmix(self._mixed_values(store, at))

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        # Keys must be unmixed before they can be rotated. Scores need not be bit-identical for any batch, so a matrix
        # product does it.
        matrix = mixing(queries.shape[-1], None, queries.device)

        codes: RotateCodes = store.codes
        decodes = is_fused(codes.keys, self.bits_of_keys, queries.shape[-1])

        def keys(store: StageStore, at: At) -> Tensor:
            if not decodes:
                return self._mixed_keys(store, at) @ matrix
            scale = take(codes.key_scale, at).float()
            zero = -scale * take(codes.key_zero, at)
            mixed = call(decode_channel_groups, take(codes.keys, at), scale, zero, bits=self.bits_of_keys)
            return self._in_order(codes, mixed) @ matrix

        return score_by_chunks(keys, store, queries, rope, store.codes.keys.shape[2])

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        """Weighted sum of the values of all slots, of which only the sum is unmixed; see `Stage.mix`."""
        codes: RotateCodes = store.codes
        if not is_fused(codes.values, self.bits_of_values, codes.place.shape[-1]):
            return unmix(mix_by_chunks(self._mixed_values, store, weights))
        # A code stands for scale * (code - zero).
        scale = widen(codes.value_scale)
        return unmix(mix_fused(codes.values, scale, -scale * codes.value_zero, weights, self.bits_of_values))

    def _mixed_keys(self, store: StageStore, at: At) -> Tensor:
        codes: RotateCodes = store.codes
        parts = (codes.keys, codes.key_scale, codes.key_zero)
        mixed = _read(parts, at, codes.place.shape[-1], self.bits_of_keys)
        return self._in_order(codes, mixed)

    def _in_order(self, codes: RotateCodes, mixed: Tensor) -> Tensor:
        """Mixed keys [B, H, n, D], of which the channels are sorted, in the order in which they are unmixed."""
        if codes.key_scale.shape[-1] == 1:
            return mixed
        return mixed.gather(-1, codes.place.long().expand_as(mixed))

    def _mixed_values(self, store: StageStore, at: At) -> Tensor:
        codes: RotateCodes = store.codes
        parts = (codes.values, codes.value_scale, codes.value_zero)
        return _read(parts, at, codes.place.shape[-1], self.bits_of_values)


def _read(parts: tuple[Tensor, Tensor, Tensor], at: At, width: int, bits: int) -> Tensor:
    """What the codes, scales and zeros of the slots `at` stand for, [B, H, n, D] fp32."""
    code, scale, zero = (take(part, at) for part in parts)
    grouped = unpack_float(code, bits, width).unflatten(-1, (scale.shape[-1], -1))
    return grouped.sub_(zero[..., None].float()).mul_(scale.float()[..., None]).flatten(-2)


def _put(parts: tuple[Tensor, Tensor, Tensor], mixed: Tensor, slots: Tensor, write_mask: Tensor, bits: int) -> None:
    """Quantize groups and write them; 2-bit codes clip the outer fifth of the range on either side."""
    grouped = mixed.unflatten(-1, (parts[1].shape[-1], -1))
    least, most = torch.aminmax(grouped, dim=-1, keepdim=True)
    top = 2**bits - 1
    clip = 0.8 if bits == 2 else 1.0
    # The range contains 0, so that the zero is a code.
    low = least.clamp(max=0) * clip
    high = most.clamp(min=0) * clip
    # A group of equal elements has their absolute value as its scale, so that it is one step from 0.
    scale = round_to_half(torch.where(least == most, most.abs(), (high - low) / top).clamp(max=FP16))
    divisor = scale.masked_fill(scale == 0, 1)  # with scale 0, every code is decoded to 0
    zero = (-low / divisor).round().clamp(0, top)
    code = ((grouped / divisor).round() + zero).clamp(0, top).to(torch.uint8)
    put(parts[0], pack(code.flatten(-2), bits), slots, write_mask)
    put(parts[1], scale.squeeze(-1).half(), slots, write_mask)
    put(parts[2], zero.squeeze(-1).to(torch.uint8), slots, write_mask)


def _places(mixed: Tensor, write_mask: Tensor) -> Tensor:
    """The position of each channel when channels are sorted by their sum of absolute values, [B, H, 1, D] int16.

    The largest comes first.
    """
    # Summed as integers, because the rounding of a floating-point sum depends on how many masked tokens stand between
    # the others.
    size = mixed.abs().masked_fill(~write_mask[..., None], 0)
    unit = size.amax((2, 3), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) * 2.0**-24
    total = (size / unit).round().long().sum(2, keepdim=True)
    return total.sort(dim=-1, descending=True, stable=True).indices.argsort(-1).to(torch.int16)
