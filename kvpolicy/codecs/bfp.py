"""Block floating point: channels of alike size share an exponent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.codecs._common import check_least, is_fresh, mix_by_chunks, ordinary_layout, put, score_by_chunks, take
from kvpolicy.codecs._uniform import FP16
from kvpolicy.codecs.packing import pack, packed_width, unpack
from kvpolicy.protocols import ALL_HEADS, At, Calibration, Layout, ModelInfo, RotaryView, Stage, StageStore, Traits
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.validation import check_fields


class BFPCodes(NamedTuple):
    """What BFP stores of one layer; `D'` is the bytes of D mantissas, `n` the blocks of a token.

    Attributes:
        keys: Mantissas of the keys in the order of `order`, [B, H, C, D'] uint8.
        key_scale: Exponents of the keys' blocks, [B, H, C, n] uint8.
        order: Which channel stands at each place, [B, H, 1, D] int16.
        values: Mantissas, [B, H, C, D'] uint8; where values are exact, the numbers themselves, [B, H, C, D] fp16.
        value_scale: Exponents of the values' blocks, [B, H, C, n] uint8; without width where values are exact.
    """

    keys: Tensor
    key_scale: Tensor
    order: Tensor
    values: Tensor
    value_scale: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class BFP:
    """Give each token's channels short mantissas, and blocks of them one exponent.

    In a block the largest number decides how fine the others are. So key channels are sorted by size first: then
    channels of outliers share blocks with each other. Queries are sorted alike instead of the keys back, so reading
    costs nothing for it. Any slot can be used again at no loss. A token is stored in 4.25 bits per number at
    `mantissa=4` with blocks of 32.

    Args:
        mantissa: Bits of a mantissa and its sign: 3, 4, 5, 6 or 8.
        block_channels: Channels that share an exponent; a token's last block may have fewer.
        exact_values: Whether values are stored in fp16, instead of like keys but without sorting.
        residual_length: How many of the newest tokens always stay exact.
        block_size: How many tokens are coded at a time.

    Raises:
        KVPolicyError: Where a parameter is out of its range.

    Examples:
        >>> BFP(mantissa=4).layout(1000)
        Layout(exact=64, coded=(968,))

    Source: Accurate Block Quantization in LLMs with Outliers (2024), K-sort and BFP12. Only its abstract and a summary
    were read, so all details are unverified.
    Differences: the paper sorts the rows of the key projection offline, by their norm, and the query projection's with
    them, and must keep the rotary embedding's pairs together. Here the model stays as it is: keys are sorted after the
    rotary embedding, by the norm of each channel over the first tokens that a head codes, and that order stays until
    all of its coded tokens are gone. The paper codes keys alone, as `exact_values` does; by default values are
    coded too. Exact values are fp16, clipped to its range, whatever the model's dtype is: bfloat16 keeps all of its
    digits but for numbers below 2^-14. Numbers are sign and magnitude, rounded to nearest, ties to even, and clipped
    to the largest magnitude. A block of numbers below about 2^-120 is zero. The newest tokens stay exact.
    """

    mantissa: Literal[3, 4, 5, 6, 8] = 4
    block_channels: int = 32
    exact_values: bool = False
    residual_length: int = 32
    block_size: int = 32

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_fields(self)
        if self.mantissa not in (3, 4, 5, 6, 8):
            raise KVPolicyError(f"BFP's mantissa is {self.mantissa!r}: give 3, 4, 5, 6 or 8.")
        check_least(self, block_channels=(1, 32), residual_length=(0, 32), block_size=(1, 32))

    @property
    def traits(self) -> Traits:
        """A block is coded at a time, and slots share nothing but their head's order."""
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
        """Raise KVPolicyError where a channel's number does not fit its place in the order."""
        if model.head_dim > 2**15:
            raise KVPolicyError(
                f"BFP numbers channels up to {2**15}, and the head dimension is {model.head_dim}: use another codec."
            )

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> BFPCodes:
        """Empty codes for `slots` slots."""

        def zeros(count: int, width: int, dtype: torch.dtype = torch.uint8) -> Tensor:
            return torch.zeros(batch, heads, count, width, dtype=dtype, device=device)

        packed, blocks = packed_width(head_dim, self.mantissa), -(-head_dim // self.block_channels)
        exact = self.exact_values
        return BFPCodes(
            zeros(slots, packed),
            zeros(slots, blocks),
            zeros(1, head_dim, torch.int16),
            zeros(slots, head_dim, torch.float16) if exact else zeros(slots, packed),
            zeros(slots, 0 if exact else blocks),
        )

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        """Encode tokens into slots, in place; see `Stage.write`."""
        codes: BFPCodes = store.codes
        if keys.shape[2] == 0 or codes.keys.shape[2] == 0:
            return
        keys, values = keys.float(), values.float()
        _sort(codes, keys, write_mask, occupied)
        mantissas, exponents = self._encode(keys.gather(-1, codes.order.long().expand_as(keys)))
        put(codes.keys, mantissas, slots, write_mask)
        put(codes.key_scale, exponents, slots, write_mask)
        if self.exact_values:
            put(codes.values, values.clamp(-FP16, FP16).half(), slots, write_mask)
            return
        mantissas, exponents = self._encode(values)
        put(codes.values, mantissas, slots, write_mask)
        put(codes.value_scale, exponents, slots, write_mask)

    def keys(self, store: StageStore, at: At) -> Tensor:
        """Keys of the slots `at`, [B, H, n, D] fp32."""
        keys = self._sorted_keys(store, at)
        return keys.gather(-1, store.codes.order.argsort(-1).expand_as(keys))

    def values(self, store: StageStore, at: At) -> Tensor:
        """Values of the slots `at`, [B, H, n, D] fp32."""
        codes: BFPCodes = store.codes
        if self.exact_values:
            return take(codes.values, at).float()
        return self._decode(codes.values, codes.value_scale, at, codes.order.shape[-1])

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        """Products of queries with every slot's key; see `Stage.score`."""
        assert rope is None, "keys are coded as attention sees them"
        queries = queries.gather(-1, store.codes.order.long().expand_as(queries))
        return score_by_chunks(self._sorted_keys, store, queries, None, store.codes.keys.shape[2])

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        """Every slot's value, weighted and summed; see `Stage.mix`."""
        return mix_by_chunks(self.values, store, weights)

    def _sorted_keys(self, store: StageStore, at: At) -> Tensor:
        codes: BFPCodes = store.codes
        return self._decode(codes.keys, codes.key_scale, at, codes.order.shape[-1])

    def _encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Packed mantissas of `x` [B, H, n, D], and exponents of its blocks: biased by 127, 0 for a block of zeros."""
        blocks = self._blocks(x)
        biased = blocks.abs().amax(-1).view(torch.int32) >> 23
        biased = biased.masked_fill(biased <= self.mantissa - 2, 0)  # else the step would be no normal number
        step, most = self._step(biased), 2 ** (self.mantissa - 1) - 1
        code = (blocks / step.masked_fill(step == 0, 1)[..., None]).round().clamp(-most, most) + (most + 1)
        return pack(code.to(torch.uint8).flatten(-2)[..., : x.shape[-1]], self.mantissa), biased.to(torch.uint8)

    def _decode(self, mantissas: Tensor, exponents: Tensor, at: At, head_dim: int) -> Tensor:
        code = unpack(take(mantissas, at), self.mantissa, head_dim).float() - 2 ** (self.mantissa - 1)
        return (self._blocks(code) * self._step(take(exponents, at).int())[..., None]).flatten(-2)[..., :head_dim]

    def _blocks(self, x: Tensor) -> Tensor:
        """Channels in blocks, [..., n, block_channels], filled up with zeros."""
        size = min(self.block_channels, x.shape[-1])
        return F.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))

    def _step(self, biased: Tensor) -> Tensor:
        """What a mantissa of 1 is worth, from int32 exponents; made of bits, so that it is a power of two exactly."""
        step = ((biased - (self.mantissa - 2)) << 23).view(torch.float32)
        return step.masked_fill(biased == 0, 0)


def _sort(codes: BFPCodes, keys: Tensor, write_mask: Tensor, occupied: Tensor) -> None:
    """Find the order of channels anew, largest first, in heads that hold nothing and are given something.

    Sums are fp64, so that their order does not matter: a row must give the same codes with more padding.
    """
    square = keys.square().masked_fill(~write_mask[..., None], 0).sum(2, keepdim=True, dtype=torch.float64)
    order = square.argsort(dim=-1, descending=True, stable=True).to(torch.int16)
    fresh = is_fresh(write_mask, occupied)
    codes.order.copy_(torch.where(fresh, order, codes.order))
