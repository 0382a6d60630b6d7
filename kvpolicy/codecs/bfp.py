"""BFP: block floating point, in which channels of similar size share an exponent."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.codecs.buffer import buffer_sizes
from kvpolicy.codecs.common import (
    ENCODED_AT_ONCE,
    TwoSides,
    is_empty_head,
    mix_by_chunks,
    put,
    score_by_chunks,
    sum_tokens,
    take,
    token_ranges,
)
from kvpolicy.codecs.uniform import FP16, is_fused, mix_fused, score_fused
from kvpolicy.kernels.packing import pack, packed_width, unpack_float
from kvpolicy.protocols import At, ModelInfo, RotaryView, StageStore, Traits
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import AutoInt, least, strategy


class BFPCodes(NamedTuple):
    """The tensors of one layer; `D'` is the bytes of D mantissas, `n` the blocks of a token.

    Attributes:
        keys: Mantissas of sorted keys, [B, H, C, D'] uint8.
        key_scale: Exponents of the blocks of keys, [B, H, C, n] uint8.
        order: The channel at each position of a sorted key, [B, H, 1, D] int16.
        values: Mantissas, [B, H, C, D'] uint8; with `exact_values` the values themselves, [B, H, C, D] fp16.
        value_scale: Exponents of the blocks of values, [B, H, C, n] uint8; of width 0 with `exact_values`.
    """

    keys: Tensor
    key_scale: Tensor
    order: Tensor
    values: Tensor
    value_scale: Tensor


@strategy
class BFP(TwoSides):
    """Store short mantissas, with one exponent per block of channels.

    The largest element of a block determines the resolution of the others. So key channels are sorted by size first,
    and outlier channels share blocks with each other. Queries are sorted in the same way, so keys need not be sorted
    back. Every slot can be reused without additional error. At `mantissa=4` with blocks of 32, an element takes 4.25
    bits.

    Args:
        mantissa: Bits of a mantissa including its sign: 3, 4, 5, 6 or 8.
        block_channels: Channels that share an exponent; the last block of a token may have fewer.
        exact_values: Whether values are stored in fp16. Otherwise they are encoded like keys, but not sorted.
        residual_length: How many of the newest tokens always stay in full precision. `auto`: one for every 32 tokens of
            the budget, less the block if `block_size` is `auto` too; at most 32.
        block_size: How many tokens are encoded at a time. `auto`: one for every 32 tokens of the budget, at
            least 1 and at most 32.

    Raises:
        KVPolicyError: If a parameter is out of range.

    Examples:
        >>> BFP(mantissa=4).layout(1000)
        Layout(exact=31, coded=(1000,))

    Source:
        Accurate Block Quantization in LLMs with Outliers (2024), K-sort and BFP12. Only its abstract and a summary were
        read, so all details are unverified. Differences:

        - The paper sorts the rows of the key projection offline, by their norm, together with those of the query
          projection, and must keep the pairs of the rotary embedding together. Here the model is not changed: keys are
          sorted after the rotary embedding, by the norm of each channel over the first tokens that are encoded in a
          head, and this order stays until all encoded tokens of the head are gone.
        - The paper encodes keys only, like `exact_values`; by default values are encoded too.
        - With `exact_values`, values are fp16, clipped to its range, whatever the dtype of the model: bfloat16 numbers
          keep all of their digits unless they are below 2^-17 or above 65504, and fp32 numbers lose digits.
        - Mantissas are sign and magnitude, rounded to nearest, ties to even, and clipped to the largest magnitude. A
          block of elements below about 2^-120 is zero.
        - A block never spans two heads; the last one of a token may be shorter.
        - The newest tokens stay in full precision.
    """

    mantissa: Literal[3, 4, 5, 6, 8] = 4
    block_channels: int = least(1, 32)
    exact_values: bool = False
    residual_length: AutoInt = least(0, "auto")
    block_size: AutoInt = least(1, "auto")

    @property
    def traits(self) -> Traits:
        """Tokens are encoded in blocks; slots share only the channel order of their head."""
        return self.traits_for(None)

    def traits_for(self, tokens: int | None) -> Traits:
        residual, block = buffer_sizes(tokens, residual=self.residual_length, block=self.block_size)
        return Traits(block=block, residual=residual, per_head=("order",), at_once=ENCODED_AT_ONCE)

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if the order of the channels does not fit int16."""
        if model.head_dim > 2**15:
            raise KVPolicyError(f"The head dimension must be at most {2**15} for BFP, got {model.head_dim}; try KIVI.")

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> BFPCodes:

        def zeros(count: int, width: int, dtype: torch.dtype = torch.uint8) -> Tensor:
            return torch.zeros(batch, heads, count, width, dtype=dtype, device=device)

        packed = packed_width(head_dim, self.mantissa)
        blocks = -(-head_dim // self.block_channels)
        exact = self.exact_values
        return BFPCodes(
            keys=zeros(slots, packed),
            key_scale=zeros(slots, blocks),
            order=zeros(1, head_dim, torch.int16),
            values=zeros(slots, head_dim, torch.float16) if exact else zeros(slots, packed),
            value_scale=zeros(slots, 0 if exact else blocks),
        )

    def write_keys(self, store: StageStore, keys: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor) -> None:
        """Encode keys into slots, in the channel order of their heads; see `Stage.write`."""
        codes: BFPCodes = store.codes
        if keys.shape[2] == 0 or codes.keys.shape[2] == 0:
            return
        _fit_order(codes, keys, write_mask, occupied)
        for at in token_ranges(keys.shape[2]):
            some = keys[:, :, at].float()
            encoded = self._encode(some.gather(-1, codes.order.long().expand_as(some)))
            for target, data in zip((codes.keys, codes.key_scale), encoded, strict=True):
                put(target, data, slots[:, :, at], write_mask[:, :, at])

    def write_values(
        self, store: StageStore, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        codes: BFPCodes = store.codes
        if values.shape[2] == 0 or codes.values.shape[2] == 0:
            return
        for at in token_ranges(values.shape[2]):
            some = values[:, :, at].float()
            encoded = (some.clamp(-FP16, FP16).half(),) if self.exact_values else self._encode(some)
            for target, data in zip((codes.values, codes.value_scale), encoded, strict=False):
                put(target, data, slots[:, :, at], write_mask[:, :, at])

    def keys(self, store: StageStore, at: At) -> Tensor:
        keys = self._sorted_keys(store, at)
        return keys.gather(-1, store.codes.order.argsort(-1).expand_as(keys))

    def values(self, store: StageStore, at: At) -> Tensor:
        codes: BFPCodes = store.codes
        if self.exact_values:
            return take(codes.values, at).float()
        return self._decode(codes.values, codes.value_scale, at, codes.order.shape[-1])

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        assert rope is None, "keys are encoded as attention sees them"
        # A dot product does not depend on the order of the channels, and there are fewer queries to sort than keys.
        codes: BFPCodes = store.codes
        queries = queries.gather(-1, codes.order.long().expand_as(queries))
        if self._is_fused(codes.keys, codes.key_scale, store, queries.shape[-1]):
            return score_fused(codes.keys, *self._bounds(codes.key_scale), queries, self.mantissa)
        return score_by_chunks(self._sorted_keys, store, queries, None, store.codes.keys.shape[2])

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        codes: BFPCodes = store.codes
        if not self.exact_values and self._is_fused(codes.values, codes.value_scale, store, codes.order.shape[-1]):
            return mix_fused(codes.values, *self._bounds(codes.value_scale), weights, self.mantissa)
        return mix_by_chunks(self.values, store, weights)

    def _is_fused(self, codes: Tensor, exponents: Tensor, store: StageStore, head_dim: int) -> bool:
        """Whether mantissas are summed without decoding them: those in blocks of equal size."""
        whole = exponents.shape[-1] * min(self.block_channels, head_dim) == head_dim
        return whole and is_fused(codes, self.mantissa, head_dim, store.page_slots)

    def _bounds(self, exponents: Tensor) -> tuple[Tensor, Tensor]:
        """The scale and the zero of each block, as of uniform codes, [B, H, C, n] fp32 each."""
        step = self._step(exponents.int())
        return step, step * -(2 ** (self.mantissa - 1))

    def _sorted_keys(self, store: StageStore, at: At) -> Tensor:
        codes: BFPCodes = store.codes
        return self._decode(codes.keys, codes.key_scale, at, codes.order.shape[-1])

    def _encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Packed mantissas of `x` [B, H, n, D], and exponents of its blocks: biased by 127, 0 for a block of zeros."""
        blocks = self._blocks(x)
        # The exponent field of the largest element. The block becomes zero if its step would be a subnormal number.
        biased = blocks.abs().amax(-1).view(torch.int32) >> 23
        biased = biased.masked_fill(biased <= self.mantissa - 2, 0)
        step = self._step(biased)
        # The largest element may be rounded up to 2^(mantissa - 1), for which there is no code, so it is clipped.
        # Mantissas are stored with an offset, so that they are not negative.
        most = 2 ** (self.mantissa - 1) - 1
        code = (blocks / step.masked_fill(step == 0, 1)[..., None]).round().clamp(-most, most) + (most + 1)
        # The padding of the last block is not stored.
        return pack(code.to(torch.uint8).flatten(-2)[..., : x.shape[-1]], self.mantissa), biased.to(torch.uint8)

    def _decode(self, mantissas: Tensor, exponents: Tensor, at: At, head_dim: int) -> Tensor:
        code = unpack_float(take(mantissas, at), self.mantissa, head_dim) - 2 ** (self.mantissa - 1)
        return (self._blocks(code) * self._step(take(exponents, at).int())[..., None]).flatten(-2)[..., :head_dim]

    def _blocks(self, x: Tensor) -> Tensor:
        """Channels in blocks, [..., n, block_channels], padded with zeros."""
        size = min(self.block_channels, x.shape[-1])
        return F.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))

    def _step(self, biased: Tensor) -> Tensor:
        """The number that a mantissa of 1 stands for, from biased int32 exponents."""
        # Written into the exponent field, so that it is exactly a power of two.
        step = ((biased - (self.mantissa - 2)) << 23).view(torch.float32)
        return step.masked_fill(biased == 0, 0)


def _fit_order(codes: BFPCodes, keys: Tensor, write_mask: Tensor, occupied: Tensor) -> None:
    """Sort the channels by their norm, largest first, in heads without an occupied slot."""
    square = sum_tokens(keys, write_mask, torch.square)
    order = square.argsort(dim=-1, descending=True, stable=True).to(torch.int16)
    codes.order.copy_(torch.where(is_empty_head(write_mask, occupied), order, codes.order))
