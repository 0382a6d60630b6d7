"""Few bits per number, a low rank of what they miss, and the outliers as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs._blocks import Blocks, blocks_of
from kvpolicy.codecs._common import check_least, coarse, mix_by_chunks, ordinary_layout, put, score_by_chunks, take
from kvpolicy.codecs._lowrank import basis
from kvpolicy.codecs._outliers import each_side, extremes, fill, index_dtype
from kvpolicy.codecs._uniform import FP16, codes_in, dequantize, frame, largest_divisor, quantize
from kvpolicy.codecs.packing import pack, packed_width, unpack
from kvpolicy.protocols import ALL_HEADS, At, Calibration, Layout, ModelInfo, RotaryView, Stage, StageStore, Traits
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.validation import check_fields


class GEARCodes(NamedTuple):
    """What GEAR stores of one layer.

    `D'` is D * bits / 8, X is C / group_size, `v` the channels of a value group, `r` the rank, `k` and `m` the
    outliers of a key channel and of a value.

    Attributes:
        keys: Key codes, [B, H, C, D'] uint8.
        key_scale: [B, H, X, D] fp16.
        key_zero: [B, H, X, D] fp16.
        key_places: The token of each outlier in its block, [B, H, X, k, D] uint8 or int16.
        key_outliers: [B, H, X, k, D] fp16.
        key_left: Each key's part in the rows of its block, [B, H, C, r] fp16.
        key_right: Orthonormal rows that hold the most of a block's errors, [B, H, X, r, D] fp16.
        values: Value codes, [B, H, C, D'] uint8.
        value_scale: [B, H, C, D / v] fp16.
        value_zero: [B, H, C, D / v] fp16.
        value_places: The channel of each outlier, [B, H, C, m] uint8 or int16.
        value_outliers: [B, H, C, m] fp16.
        value_left: [B, H, C, r] fp16.
        value_right: [B, H, X, r, D] fp16.
    """

    keys: Tensor
    key_scale: Tensor
    key_zero: Tensor
    key_places: Tensor
    key_outliers: Tensor
    key_left: Tensor
    key_right: Tensor
    values: Tensor
    value_scale: Tensor
    value_zero: Tensor
    value_places: Tensor
    value_outliers: Tensor
    value_left: Tensor
    value_right: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GEAR:
    """Quantize to a few bits, add a low rank of the error, and keep the outliers.

    X ~ Q + L + S. S takes the largest and the smallest numbers of every key channel in a block and of every value.
    Q quantizes what is left. L is a product of two thin matrices, close to the error of Q in a block of a head. At an
    outlier's place the stored number is read, everywhere else Q + L. The newest tokens stay exact.

    Args:
        bits: Bits per code: 2, 4 or 8.
        group_size: Tokens of a block, at least 2: of a key channel's scale and outliers, and of a low rank.
        rank: Rank of L; 0 for none.
        sparse: Share of a vector's numbers that are kept, half of them the largest, half the smallest, rounded, and at
            least one of each; 0 for none. Below 1.
        residual_length: How many of the newest tokens always stay exact.
        backbone: What is quantized with one scale and zero: a key channel of a block in any case, and of a value
            `group_size` channels or the largest divisor of the head dimension below it (`kivi`), or all (`kcvt`).

    Examples:
        >>> GEAR(bits=4, rank=4).layout(1000)
        Layout(exact=128, coded=(960,))

    Source: GEAR (arXiv:2403.05527), the equations X ~ Q + L + S, low rank by power iteration for each head.
    Differences: the paper (unverified in full; its code was read) makes one low rank of the prompt and one, of half
    the rank, of each decoded block of 64 tokens; here every block has one of the same rank, so that shapes are fixed.
    S is what Q + L lacks at an outlier's place, so the number there comes back exact, in fp16, and the error that L
    sees there is zero. Outliers of a key channel are a share of a block's tokens (in the code, of all channels of all
    heads). At least one number on each side is kept. `kcvt` scales a key channel by block, not over the whole prompt.
    The power iteration begins with fixed numbers, not random ones. The newest `residual_length` tokens stay exact. A
    group whose numbers are all equal has the code 0. Numbers beyond fp16 are clipped to its range. Where tokens are
    evicted, a new token takes a dead slot of a block, and until all of the block is dead its key scales and zeros, the
    rows of its low ranks and the places of its key outliers stay: a code is clipped, an error is projected on the
    rows, and an outlier whose place is the new token's takes its number.
    """

    bits: Literal[2, 4, 8] = 2
    group_size: int = 64
    rank: int = 2
    sparse: float = 0.02
    residual_length: int = 64
    backbone: Literal["kivi", "kcvt"] = "kivi"

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_fields(self)
        if self.bits not in (2, 4, 8):
            raise KVPolicyError(f"GEAR's bits is {self.bits!r}: give 2, 4 or 8.")
        if not 2 <= self.group_size <= 2**15:
            raise KVPolicyError(f"GEAR's group_size is {self.group_size}: give 2 to 32768, such as 64.")
        if not 0 <= self.rank <= self.group_size:
            raise KVPolicyError(f"GEAR's rank is {self.rank}: give 0 to the group_size, which is {self.group_size}.")
        if not 0 <= self.sparse < 1:
            raise KVPolicyError(f"GEAR's sparse is {self.sparse}: give a share from 0 to below 1, such as 0.02.")
        check_least(self, residual_length=(0, 64))
        if self.backbone not in ("kivi", "kcvt"):
            raise KVPolicyError(f"GEAR's backbone is {self.backbone!r}: give 'kivi' or 'kcvt'.")

    @property
    def traits(self) -> Traits:
        """A block is coded at a time."""
        return Traits(block=self.group_size, group_size=self.group_size, residual=self.residual_length)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """One."""
        return (self,)

    def layout(self, tokens: int) -> Layout:
        """Room for the residual and one block exact, and whole blocks coded."""
        return ordinary_layout(self.traits, tokens)

    def load_calibration(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> Calibration:
        """Nothing is calibrated."""
        return ()

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError where the low rank is not low."""
        if self.rank > model.head_dim:
            raise KVPolicyError(
                f"GEAR's rank is {self.rank}, and the model's heads have {model.head_dim} numbers: give a rank "
                f"of at most {model.head_dim}."
            )

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> GEARCodes:
        """Empty codes for `slots` slots, a multiple of the group size."""
        assert slots % self.group_size == 0, "only whole blocks can be coded"

        def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
            return torch.zeros(batch, heads, *shape, dtype=dtype, device=device)

        blocks, parts = slots // self.group_size, head_dim // self._channels(head_dim)
        of_key, of_value = (2 * each_side(self.sparse, length) for length in (self.group_size, head_dim))
        packed = packed_width(head_dim, self.bits)
        return GEARCodes(
            keys=zeros(slots, packed, dtype=torch.uint8),
            key_scale=zeros(blocks, head_dim),
            key_zero=zeros(blocks, head_dim),
            key_places=zeros(blocks, of_key, head_dim, dtype=index_dtype(self.group_size)),
            key_outliers=zeros(blocks, of_key, head_dim),
            key_left=zeros(slots, self.rank),
            key_right=zeros(blocks, self.rank, head_dim),
            values=zeros(slots, packed, dtype=torch.uint8),
            value_scale=zeros(slots, parts),
            value_zero=zeros(slots, parts),
            value_places=zeros(slots, of_value, dtype=index_dtype(head_dim)),
            value_outliers=zeros(slots, of_value),
            value_left=zeros(slots, self.rank),
            value_right=zeros(blocks, self.rank, head_dim),
        )

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        """Encode tokens into slots, in place; see `Stage.write`."""
        codes: GEARCodes = store.codes
        if keys.shape[2] == 0 or codes.keys.shape[2] == 0:
            return
        slots = slots.masked_fill(~write_mask, 0)
        blocks = blocks_of(slots, write_mask, occupied, self.group_size)
        keys, values = keys.float().clamp(-FP16, FP16), values.float().clamp(-FP16, FP16)
        self._fit_keys(codes, keys, blocks)
        error = self._write_keys(codes, keys, slots, write_mask)
        self._write_error(codes.key_left, codes.key_right, error, slots, write_mask, blocks)
        error = self._write_values(codes, values, slots, write_mask)
        self._write_error(codes.value_left, codes.value_right, error, slots, write_mask, blocks)

    def keys(self, store: StageStore, at: At) -> Tensor:
        """Keys of the slots `at`, [B, H, n, D] fp32."""
        codes: GEARCodes = store.codes
        block = coarse(at, self.group_size)
        code = self._by_block(unpack(take(codes.keys, at), self.bits, codes.key_scale.shape[-1]), at)
        scale, zero = (take(t, block).float()[:, :, :, None] for t in (codes.key_scale, codes.key_zero))
        x = self._add_error(code * scale + zero, codes.key_left, codes.key_right, at)
        place = self._places(at, code.device)
        for some, kept in zip(codes.key_places.unbind(3), codes.key_outliers.unbind(3), strict=True):
            here = take(some, block)[:, :, :, None] == place
            x = torch.where(here, take(kept, block)[:, :, :, None].float(), x)
        return x.flatten(2, 3)

    def values(self, store: StageStore, at: At) -> Tensor:
        """Values of the slots `at`, [B, H, n, D] fp32."""
        codes: GEARCodes = store.codes
        code, scale, zero = (take(t, at) for t in (codes.values, codes.value_scale, codes.value_zero))
        x = self._by_block(dequantize(code, scale, zero, self.bits, codes.key_scale.shape[-1]), at)
        x = self._add_error(x, codes.value_left, codes.value_right, at).flatten(2, 3)
        return x.scatter(-1, take(codes.value_places, at).long(), take(codes.value_outliers, at).float())

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        """Products of queries with every slot's key; see `Stage.score`."""
        return score_by_chunks(self.keys, store, queries, rope, store.codes.keys.shape[2], self.group_size)

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        """Every slot's value, weighted and summed; see `Stage.mix`."""
        return mix_by_chunks(self.values, store, weights, self.group_size)

    def _channels(self, head_dim: int) -> int:
        """Channels of a value group."""
        return head_dim if self.backbone == "kcvt" else largest_divisor(head_dim, self.group_size)

    def _fit_keys(self, codes: GEARCodes, keys: Tensor, blocks: Blocks) -> None:
        """Fix scale, zero and the places of outliers of the blocks that begin, and take the outliers of all."""
        some, there = blocks.bring(keys)  # [B, H, F, g, D]
        there = there.expand_as(some)
        places = extremes(some, codes.key_places.shape[3] // 2, 3, there)
        least, most = torch.aminmax(fill(some, there.scatter(3, places, False), 3), dim=3)
        scale, zero = frame(least, most, self.bits)
        put(codes.key_scale, scale.half(), blocks.which, blocks.fresh)
        put(codes.key_zero, zero.half(), blocks.which, blocks.fresh)
        if self.sparse:
            put(codes.key_places, places.to(codes.key_places.dtype), blocks.which, blocks.fresh)
            shape = codes.key_places.shape
            token = blocks.token[..., None].expand(*shape[:2], -1, -1, shape[-1]).gather(3, codes.key_places.long())
            new = keys.gather(2, token.clamp(min=0).flatten(2, 3)).unflatten(2, shape[2:4])
            codes.key_outliers.copy_(torch.where(token >= 0, new.half(), codes.key_outliers))

    def _write_keys(self, codes: GEARCodes, keys: Tensor, slots: Tensor, write_mask: Tensor) -> Tensor:
        """Write the codes of keys; what they miss, [B, H, n, D]."""
        block = coarse(slots, self.group_size)
        scale, zero = take(codes.key_scale, block).float(), take(codes.key_zero, block).float()
        code = codes_in(keys, scale, zero, self.bits)
        put(codes.keys, pack(code, self.bits), slots, write_mask)
        error, place = keys - (code * scale + zero), (slots % self.group_size)[..., None]
        for some in codes.key_places.unbind(3):
            error = error.masked_fill(take(some, block) == place, 0)
        return error

    def _write_values(self, codes: GEARCodes, values: Tensor, slots: Tensor, write_mask: Tensor) -> Tensor:
        """Write the codes of values and their outliers; what the codes miss, [B, H, n, D]."""
        head_dim = values.shape[-1]
        places = extremes(values, codes.value_places.shape[3] // 2, -1)
        kept = torch.ones_like(values, dtype=torch.bool).scatter(-1, places, False)
        code, scale, zero = quantize(fill(values, kept, -1), self.bits, self._channels(head_dim))
        put(codes.values, code, slots, write_mask)
        put(codes.value_scale, scale, slots, write_mask)
        put(codes.value_zero, zero, slots, write_mask)
        if self.sparse:
            put(codes.value_places, places.to(codes.value_places.dtype), slots, write_mask)
            put(codes.value_outliers, values.gather(-1, places).half(), slots, write_mask)
        return (values - dequantize(code, scale, zero, self.bits, head_dim)).masked_fill(~kept, 0)

    def _write_error(
        self, left: Tensor, right: Tensor, error: Tensor, slots: Tensor, write_mask: Tensor, blocks: Blocks
    ) -> None:
        """Fix the rows of the low rank of the blocks that begin, and write each token's part in its block's rows."""
        if not self.rank:
            return
        put(right, basis(blocks.bring(error)[0], self.rank).half(), blocks.which, blocks.fresh)
        block = coarse(slots, self.group_size)
        parts = [(error * take(row, block).float()).sum(-1) for row in right.unbind(3)]
        put(left, torch.stack(parts, -1).clamp(-FP16, FP16).half(), slots, write_mask)

    def _add_error(self, x: Tensor, left: Tensor, right: Tensor, at: At) -> Tensor:
        """Add L to numbers by block, in an order that does not depend on how they are asked for."""
        part, block = self._by_block(take(left, at).float(), at), coarse(at, self.group_size)
        for rank, row in enumerate(right.unbind(3)):
            x = x + part[..., rank, None] * take(row, block).float()[:, :, :, None]
        return x

    def _by_block(self, x: Tensor, at: At) -> Tensor:
        """Slots [B, H, n, ...] as [B, H, blocks, tokens, ...], where an index has blocks of one token."""
        size = self.group_size if isinstance(at, slice) else 1
        return x.unflatten(2, (x.shape[2] // size, size))

    def _places(self, at: At, device: torch.device) -> Tensor:
        """Each slot's place in its block, to be compared with [B, H, blocks, 1, D]."""
        if isinstance(at, slice):
            return torch.arange(self.group_size, device=device)[:, None]
        return (at % self.group_size)[..., None, None]
