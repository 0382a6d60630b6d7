"""GEAR: quantization, a low-rank approximation of its error, and outliers in full."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs.blocks import Blocks, blocks_of
from kvpolicy.codecs.buffer import buffer_sizes
from kvpolicy.codecs.common import SingleStage, mix_by_chunks, score_by_chunks, take, to_groups
from kvpolicy.codecs.outliers import bounds, extremes, fill, index_dtype, outliers_per_side
from kvpolicy.codecs.side_bits import SideBits
from kvpolicy.codecs.uniform import FP16, dequantize, encode, is_fused, largest_divisor, quantize, scale_and_zero
from kvpolicy.kernels.compiled import apart, call, widen_on_cpu
from kvpolicy.kernels.fused_elements import UNROLLED, mix_elements, replace_channels, score_elements
from kvpolicy.kernels.fused_read import channel_group_parts
from kvpolicy.kernels.packing import pack, packed_width, unpack_float
from kvpolicy.kernels.slot_writes import Writes, write_slots
from kvpolicy.kernels.words import split
from kvpolicy.protocols import At, ModelInfo, RotaryView, StageStore, Traits
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import AutoInt, between, least, strategy, where

ITERATIONS = 3
"""Rounds of power iteration."""

_DEPENDENT = 1e-5
"""A row of which less than this fraction is orthogonal to the rows before it counts as linearly dependent."""


class GEARCodes(NamedTuple):
    """The tensors of one layer.

    `D'` is D * bits / 8 of the side, X the number of blocks C / group_size, `v` the channels of a value group, `r` the
    rank, `k` and `m` the number of outliers of a key channel in a block and of a value.

    Attributes:
        keys: Key codes, [B, H, C, D'] uint8.
        key_scale: [B, H, X, D] fp16.
        key_zero: [B, H, X, D] fp16.
        key_places: The position of each outlier in its block, [B, H, X, k, D] uint8 or int16.
        key_outliers: [B, H, X, k, D] fp16.
        key_left: Coefficients of each key's error in the basis of its block, [B, H, C, r] fp16.
        key_right: Orthonormal basis of the errors of a block, [B, H, X, r, D] fp16.
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


@strategy
class GEAR(SideBits, SingleStage):
    """Quantize, and store a low-rank approximation of the error and the outliers in full.

    X ~ Q + L + S. S holds the largest and smallest elements of every key channel in a block and of every value. Q
    quantizes the rest. L approximates the error of Q in a block of a head by a product of two thin matrices. An outlier
    is decoded to its stored number, everything else to Q + L. The newest tokens stay in full precision.

    Args:
        bits: Bits per code: 2, 4 or 8.
        key_bits: Bits per code of keys, which have outliers; `auto`: `bits`.
        value_bits: Bits per code of values; `auto`: `bits`.
        group_size: Tokens per block, at least 2. A block has one scale and a number of outliers per key channel, and
            one L.
        rank: Rank of L; 0 for none.
        sparse: Fraction of the elements of a vector that are outliers, in [0, 1): half of them the largest, half the
            smallest, rounded, and at least one of each; 0 for none.
        residual_length: How many of the newest tokens always stay in full precision. `auto`: one for every 32 tokens of
            the budget, at most 64.
        backbone: The value groups of Q: `group_size` channels, or the largest divisor of the head dimension up to it
            (`kivi`), or all channels (`kcvt`). A key group is one channel of a block in either case.

    Examples:
        >>> GEAR(bits=4, rank=4).layout(1000)
        Layout(exact=95, coded=(1024,))

    Source:
        GEAR (arXiv:2403.05527), the equations X ~ Q + L + S, low rank by power iteration for each head; keys after the
        rotary embedding. The paper is unverified in full; its code was read. Differences:

        - Every block has an L of the same rank, so that shapes are fixed; the paper has one L for the prompt and one,
          of half the rank, for each block of 64 decoded tokens.
        - S is what Q + L lacks of an outlier, so outliers are decoded without error, in fp16, and L does not see their
          error.
        - The outliers of a key channel are a fraction of the tokens of a block, with at least one on each side; in the
          authors' code, they are a fraction of all channels of all heads, far more than `sparse` says.
        - There are 2^bits - 1 steps; the authors' code has bits^2 - 1, which is wrong for 8 bits.
        - `kcvt` scales a key channel per block, not over the whole prompt.
        - Every row has a basis of its own; the fused path of the authors' code uses that of the first row.
        - The power iteration starts from fixed numbers, not random ones, so equal tokens have equal codes.
        - The newest `residual_length` tokens stay in full precision.
        - A group of equal elements has code 0. Elements beyond the range of fp16 are clipped.
        - Under eviction, a new token takes the slot of an evicted one. Until the whole block is empty, its key scales
          and zeros, its low-rank bases and the positions of its key outliers stay: codes are clipped, errors are
          projected onto the basis, and an outlier at the position of the new token takes the element of that token. A
          value has its own scales and outliers.
    """

    bits: Literal[2, 4, 8] = 2
    key_bits: Literal[2, 4, 8, "auto"] = "auto"
    value_bits: Literal[2, 4, 8, "auto"] = "auto"
    group_size: int = between(2, 2**15, 64)
    rank: int = 2
    sparse: float = where(lambda part: 0 <= part < 1, "at least 0 and less than 1", 0.02)
    residual_length: AutoInt = least(0, "auto")
    backbone: Literal["kivi", "kcvt"] = "kivi"

    def __post_init__(self) -> None:
        SideBits.__post_init__(self)
        if not 0 <= self.rank <= self.group_size:
            raise KVPolicyError(
                f"GEAR.rank must be between 0 and group_size={self.group_size}, got {self.rank}; try "
                f"{min(2, self.group_size)}."
            )
        if not 0 <= self.sparse < 1:
            raise KVPolicyError(f"GEAR.sparse must be at least 0 and less than 1, got {self.sparse}; try 0.02.")

    @property
    def traits(self) -> Traits:
        """Tokens are encoded in blocks."""
        return self.traits_for(None)

    def traits_for(self, tokens: int | None) -> Traits:
        residual, block = buffer_sizes(
            tokens, residual=self.residual_length, block=self.group_size, largest_residual=64
        )
        return Traits(block=block, group_size=self.group_size, residual=residual)

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if the rank exceeds the head dimension."""
        if self.rank > model.head_dim:
            raise KVPolicyError(
                f"GEAR.rank must be at most the head dimension, {model.head_dim}, got {self.rank}; try "
                f"{min(2, model.head_dim)}."
            )

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> GEARCodes:
        assert slots % self.group_size == 0, "only whole blocks can be encoded"

        def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
            return torch.zeros(batch, heads, *shape, dtype=dtype, device=device)

        blocks = slots // self.group_size
        value_groups = head_dim // self._value_group(head_dim)
        key_outliers = 2 * outliers_per_side(self.sparse, self.group_size)
        value_outliers = 2 * outliers_per_side(self.sparse, head_dim)
        return GEARCodes(
            keys=zeros(slots, packed_width(head_dim, self.bits_of_keys), dtype=torch.uint8),
            key_scale=zeros(blocks, head_dim),
            key_zero=zeros(blocks, head_dim),
            key_places=zeros(blocks, key_outliers, head_dim, dtype=index_dtype(self.group_size)),
            key_outliers=zeros(blocks, key_outliers, head_dim),
            key_left=zeros(slots, self.rank),
            key_right=zeros(blocks, self.rank, head_dim),
            values=zeros(slots, packed_width(head_dim, self.bits_of_values), dtype=torch.uint8),
            value_scale=zeros(slots, value_groups),
            value_zero=zeros(slots, value_groups),
            value_places=zeros(slots, value_outliers, dtype=index_dtype(head_dim)),
            value_outliers=zeros(slots, value_outliers),
            value_left=zeros(slots, self.rank),
            value_right=zeros(blocks, self.rank, head_dim),
        )

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        codes: GEARCodes = store.codes
        if keys.shape[2] == 0 or codes.keys.shape[2] == 0:
            return
        # A masked token may have any slot. Slot 0 is valid in the look-ups below, and `put` does not write it.
        slots = slots.masked_fill(~write_mask, 0)
        blocks = blocks_of(slots, write_mask, occupied, self.group_size)
        into = Writes.of(slots, write_mask)
        new = Writes.of(blocks.started, blocks.is_new)
        keys = keys.float().clamp(-FP16, FP16)
        values = values.float().clamp(-FP16, FP16)
        # Scales first: also the keys in older blocks are encoded with what is stored. Then the error of the codes
        # determines the low-rank part.
        self._fit_keys(codes, keys, blocks, new)
        sides = [(codes.key_left, codes.key_right, self._write_keys(codes, keys, slots, into))]
        if slots.shape[2] > self.group_size:  # a prompt, of which the errors of one side at a time are in memory
            self._write_errors(sides, slots, into, blocks, new)
            sides.clear()
        sides.append((codes.value_left, codes.value_right, self._write_values(codes, values, into)))
        self._write_errors(sides, slots, into, blocks, new)

    def keys(self, store: StageStore, at: At) -> Tensor:
        codes: GEARCodes = store.codes
        block = to_groups(at, self.group_size)
        code = self._by_block(unpack_float(take(codes.keys, at), self.bits_of_keys, codes.key_scale.shape[-1]), at)
        scale, zero = (take(t, block).float()[:, :, :, None] for t in (codes.key_scale, codes.key_zero))
        x = self._add_error(code * scale + zero, codes.key_left, codes.key_right, at)
        # One outlier of each channel and block at a time: compare its position with those of the tokens. A scatter
        # would need all tokens of the block, of which an index may ask for a single one.
        position = self._block_position(at, code.device)
        for places, outliers in zip(codes.key_places.unbind(3), codes.key_outliers.unbind(3), strict=True):
            is_outlier = take(places, block)[:, :, :, None] == position
            x = torch.where(is_outlier, take(outliers, block)[:, :, :, None].float(), x)
        return x.flatten(2, 3)

    def values(self, store: StageStore, at: At) -> Tensor:
        codes: GEARCodes = store.codes
        code, scale, zero = (take(t, at) for t in (codes.values, codes.value_scale, codes.value_zero))
        x = self._by_block(dequantize(code, scale, zero, self.bits_of_values, codes.key_scale.shape[-1]), at)
        x = self._add_error(x, codes.value_left, codes.value_right, at).flatten(2, 3)
        # Outliers replace what Q + L decode.
        return x.scatter(-1, take(codes.value_places, at).long(), take(codes.value_outliers, at).float())

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        codes: GEARCodes = store.codes
        if rope is None and self._is_fused(codes.keys, codes.key_places.shape[3], queries.shape[-1], self.bits_of_keys):
            tensors = map(widen_on_cpu, codes[1:3] + codes[5:7] + codes[3:5])
            return call(score_gear, codes.keys, *tensors, queries.float(), bits=self.bits_of_keys)
        return score_by_chunks(self.keys, store, queries, rope, store.codes.keys.shape[2], self.group_size)

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        codes: GEARCodes = store.codes
        if self._is_fused(codes.values, codes.value_places.shape[3], codes.key_scale.shape[-1], self.bits_of_values):
            tensors = map(widen_on_cpu, codes[8:10] + codes[12:14] + codes[10:12])
            return call(mix_gear, codes.values, *tensors, weights.float(), bits=self.bits_of_values)
        return mix_by_chunks(self.values, store, weights, self.group_size)

    def _is_fused(self, codes: Tensor, outliers: int, head_dim: int, bits: int) -> bool:
        """Whether codes are decoded in registers: with few terms for each number, since all of them are unrolled."""
        return outliers + self.rank <= UNROLLED and is_fused(codes, bits, head_dim)

    def _value_group(self, head_dim: int) -> int:
        """The number of channels of a value group."""
        return head_dim if self.backbone == "kcvt" else largest_divisor(head_dim, self.group_size)

    def _fit_keys(self, codes: GEARCodes, keys: Tensor, blocks: Blocks, new: Writes) -> None:
        """Fit scale, zero and outlier positions of new blocks, and store the outliers of all blocks."""
        grouped, is_written = blocks.gather(keys)  # [B, H, F, g, D]
        is_written = is_written.expand_as(grouped)
        places = extremes(grouped, codes.key_places.shape[3] // 2, 3, is_written)
        # The range to quantize is that of the elements that are neither outliers nor absent.
        least, most = (t.squeeze(3) for t in bounds(grouped, is_written.scatter(3, places, False), 3))
        is_none = least > most
        scale, zero = scale_and_zero(least.masked_fill(is_none, 0), most.masked_fill(is_none, 0), self.bits_of_keys)
        new.put(codes.key_scale, scale.half())
        new.put(codes.key_zero, zero.half())
        if self.sparse:
            new.put(codes.key_places, places.to(codes.key_places.dtype))
            # In an older block, outlier positions stay. If a token is written to one of them, its element becomes the
            # outlier; positions that are not written (-1) keep theirs.
            places = take(codes.key_places, blocks.order)  # [B, H, blocks, outliers, D]
            token = blocks.tokens(blocks.order)[..., None].expand(-1, -1, -1, -1, places.shape[-1])
            token = token.gather(3, places.long())
            found = keys.gather(2, token.clamp(min=0).flatten(2, 3)).unflatten(2, places.shape[2:4])
            outliers = torch.where(token >= 0, found.half(), take(codes.key_outliers, blocks.order))
            write_slots(codes.key_outliers, blocks.order, outliers)

    def _write_keys(self, codes: GEARCodes, keys: Tensor, slots: Tensor, into: Writes) -> Tensor:
        """Write the codes of keys, and return their quantization error, [B, H, n, D], zero for outliers."""
        block = to_groups(slots, self.group_size)
        # As stored: decoding reads these, and in an older block they were fitted to other tokens.
        scale = take(codes.key_scale, block).float()
        zero = take(codes.key_zero, block).float()
        code = encode(keys, scale, zero, self.bits_of_keys)
        into.put(codes.keys, pack(code, self.bits_of_keys))
        error = keys - (code * scale + zero)
        position = (slots % self.group_size)[..., None]
        for places in codes.key_places.unbind(3):
            error = error.masked_fill(take(places, block) == position, 0)
        return error

    def _write_values(self, codes: GEARCodes, values: Tensor, into: Writes) -> Tensor:
        """Write the codes and outliers of values, and return their quantization error, [B, H, n, D]."""
        head_dim = values.shape[-1]
        # The outliers of a value depend on its token alone, so they are stored per slot.
        places = extremes(values, codes.value_places.shape[3] // 2, -1)
        kept = torch.ones_like(values, dtype=torch.bool).scatter(-1, places, False)
        code, scale, zero = quantize(fill(values, kept, -1), self.bits_of_values, self._value_group(head_dim))
        into.put(codes.values, code)
        into.put(codes.value_scale, scale)
        into.put(codes.value_zero, zero)
        if self.sparse:
            into.put(codes.value_places, places.to(codes.value_places.dtype))
            into.put(codes.value_outliers, values.gather(-1, places).half())
        return (values - dequantize(code, scale, zero, self.bits_of_values, head_dim)).masked_fill(~kept, 0)

    def _write_errors(
        self, sides: list[tuple[Tensor, Tensor, Tensor]], slots: Tensor, into: Writes, blocks: Blocks, new: Writes
    ) -> None:
        """Fit the low-rank bases of new blocks, and write the coefficients of each token's error.

        Args:
            sides: Of keys, of values, or of both: `left`, `right` and the errors [B, H, n, D].
            slots: The slot of each token.
            into: Where tokens are written.
            blocks: The blocks that are written to.
            new: Where the bases of new blocks are written.
        """
        if not self.rank:
            return
        # In one call, since a block has few tokens, and takes as long as its operations are many.
        errors = [blocks.gather(error)[0] for *_, error in sides]
        bases = basis(errors[0] if len(errors) == 1 else torch.cat(errors), self.rank).half()
        block = to_groups(slots, self.group_size)
        for (left, right, error), rows in zip(sides, bases.chunk(len(sides)), strict=True):
            new.put(right, rows)
            # Projected onto the stored basis, in fp16, which also exists for tokens of older blocks.
            coefficients = [(error * take(row, block).float()).sum(-1) for row in right.unbind(3)]
            into.put(left, torch.stack(coefficients, -1).clamp(-FP16, FP16).half())

    def _add_error(self, x: Tensor, left: Tensor, right: Tensor, at: At) -> Tensor:
        """Add L to `x`, grouped by block."""
        coefficients = self._by_block(take(left, at).float(), at)
        block = to_groups(at, self.group_size)
        # Row by row, so that the order of the sum does not depend on whether a range or an index is read.
        for rank, row in enumerate(right.unbind(3)):
            x = x + coefficients[..., rank, None] * take(row, block).float()[:, :, :, None]
        return x

    def _by_block(self, x: Tensor, at: At) -> Tensor:
        """Slots [B, H, n, ...] as [B, H, blocks, tokens, ...]; each slot of an index is a block of one token."""
        size = self.group_size if isinstance(at, slice) else 1
        return x.unflatten(2, (x.shape[2] // size, size))

    def _block_position(self, at: At, device: torch.device) -> Tensor:
        """The position of each slot in its block, to be compared with [B, H, blocks, 1, D]."""
        if isinstance(at, slice):
            return torch.arange(self.group_size, device=device)[:, None]
        return (at % self.group_size)[..., None, None]


# Attention to the codes, which are decoded in registers: plain functions that `kvpolicy.kernels.compiled` compiles. `X`
# is the number of blocks, `r` the rank, `k` and `m` the number of outliers of a key channel in a block and of a value.


@apart
def score_gear(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    left: Tensor,
    right: Tensor,
    positions: Tensor,
    outliers: Tensor,
    queries: Tensor,
    bits: int,
) -> Tensor:
    """Products of queries with keys.

    Args:
        codes: [B, H, C, D'] uint8.
        scale: [B, H, X, D] fp32.
        zero: [B, H, X, D] fp32.
        left: [B, H, C, r] fp32.
        right: [B, H, X, r, D] fp32.
        positions: Positions of the outliers in their block, [B, H, X, k, D] fp32.
        outliers: [B, H, X, k, D] fp32.
        queries: [B, H, G, D] fp32.
        bits: Bits per code.

    Returns:
        [B, H, G, C] fp32.
    """
    blocks = scale.shape[2]
    left = left.unflatten(2, (blocks, -1))
    own = torch.arange(left.shape[3], device=codes.device).float()[:, None]
    parts: list[Tensor] = []
    for place in split(codes, bits):
        at = slice(place.channels.start, place.channels.stop)
        part = place.codes.float().unflatten(2, (blocks, -1)) * scale[:, :, :, None, at] + zero[:, :, :, None, at]
        part = _add_error(part, left, right[..., at])
        for number in range(outliers.shape[3]):
            is_outlier = positions[:, :, :, number, None, at] == own
            part = torch.where(is_outlier, outliers[:, :, :, number, None, at], part)
        parts.append(part)
    return score_elements(parts, queries)


@apart
def mix_gear(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    left: Tensor,
    right: Tensor,
    channels: Tensor,
    outliers: Tensor,
    weights: Tensor,
    bits: int,
) -> Tensor:
    """Weighted sums of values.

    Args:
        codes: [B, H, C, D'] uint8.
        scale: [B, H, C, groups] fp32.
        zero: [B, H, C, groups] fp32.
        left: [B, H, C, r] fp32.
        right: [B, H, X, r, D] fp32.
        channels: Channels of the outliers, [B, H, C, m] fp32.
        outliers: [B, H, C, m] fp32.
        weights: [B, H, G, C] fp32.
        bits: Bits per code.

    Returns:
        [B, H, G, D] fp32.
    """
    # Blocks of tokens are also the blocks that are summed; see `kvpolicy.kernels.fused_read`.
    left, channels, outliers = (t.unflatten(2, (right.shape[2], -1)) for t in (left, channels, outliers))
    parts: list[Tensor] = []
    for n, part in enumerate(channel_group_parts(codes, scale, zero, bits)):
        own = range(n * part.shape[-1], (n + 1) * part.shape[-1])
        part = _add_error(part.unflatten(2, left.shape[2:4]), left, right[..., own.start : own.stop])
        parts.append(replace_channels(part, own, channels, outliers))
    return mix_elements(parts, weights.unflatten(3, left.shape[2:4]))


def _add_error(part: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add the low-rank error, with coefficients [B, H, X, g, r] and bases [B, H, X, r, W], to [B, H, X, g, W]."""
    for rank in range(left.shape[-1]):
        part = part + left[..., rank, None] * right[:, :, :, rank, None]
    return part


# The basis of the errors of a block. All sums are elementwise products and reductions: the rounding of a matrix product
# depends on how many blocks there are, and a row of a batch must have the same codes as on its own.


def basis(error: Tensor, rank: int) -> Tensor:
    """Orthonormal rows that span most of the errors of each block, by power iteration from a fixed start.

    A row is zero if the errors of a block have a lower rank, for instance if they are all zero.

    Args:
        error: [..., n, D] fp32, zero for absent tokens.
        rank: The number of rows.

    Returns:
        [..., rank, D] fp32.

    >>> basis(torch.tensor([[0.0, 3.0], [0.0, -4.0]]), 1).abs().tolist()
    [[0.0, 1.0]]
    """
    # Scaled to 1, so that squares neither overflow nor vanish. The basis does not depend on the scale.
    unit = error / error.abs().amax((-1, -2), keepdim=True).clamp(min=1e-30)
    rows = [row.expand(*error.shape[:-2], -1) for row in _start(rank, error)]
    for _ in range(ITERATIONS):
        columns = orthonormal([(unit * row[..., None, :]).sum(-1) for row in rows])
        rows = [(unit * column[..., None]).sum(-2) for column in columns]
    return torch.stack(orthonormal(rows), -2)


def orthonormal(rows: list[Tensor]) -> list[Tensor]:
    """Orthonormalize rows [..., n] by the Gram-Schmidt process; a linearly dependent row becomes zero."""
    result: list[Tensor] = []
    for row in rows:
        before = row.norm(dim=-1, keepdim=True)
        # Twice, because rounding errors of the first pass are large if a row is nearly dependent.
        for other in result * 2:
            row = row - (row * other).sum(-1, keepdim=True) * other
        after = row.norm(dim=-1, keepdim=True)
        result.append(torch.where(after > _DEPENDENT * before, row / after.clamp(min=1e-30), 0))
    return result


def _start(rank: int, like: Tensor) -> list[Tensor]:
    """Pseudo-random numbers from -1 to 1 without a generator: the cubes of 1, 2, 3 and so on modulo a prime."""
    width = like.shape[-1]
    count = torch.arange(1, rank * width + 1, device=like.device)
    return list(((count**3 % 8191).to(like.dtype) / 4095 - 1).reshape(rank, width).unbind())
