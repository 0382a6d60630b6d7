"""MiniCache: one direction for the vectors of two neighboring layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.codecs.buffer import buffer_sizes
from kvpolicy.codecs.common import ENCODED_AT_ONCE, SingleStage, chunks, put, take
from kvpolicy.codecs.plain import Plain
from kvpolicy.codecs.uniform import FP16
from kvpolicy.kernels.products import matmul, products
from kvpolicy.protocols import At, Codec, Layout, ModelInfo, Others, RotaryView, StageStore, Traits
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.strategy import AutoInt, between, checked, least, strategy

_PARALLEL = 1e-6
"""A sine of an angle below which directions are interpolated on the line between them."""

_AT_ONCE = ENCODED_AT_ONCE // 8
"""Tokens of a head that are encoded at a time: those of two layers take, as fp64, many times the memory of fp32."""


class Side(NamedTuple):
    """Stored keys, or values, of a layer.

    Attributes:
        directions: Shared directions, [B, H, C, D] fp16; a layer may read more than it has slots.
        whole_slots: The slot of each token that is stored whole, shared, [B, H, R] int32, -1 for none.
        norm: Norms of this layer, [B, H, C, 1] fp16.
        whole: Vectors of this layer that are stored whole, [B, H, R, D] fp16.
    """

    directions: Tensor
    whole_slots: Tensor
    norm: Tensor
    whole: Tensor


class SharedCodes(NamedTuple):
    """Tensors that both layers of a pair read; `R` is the number of tokens that may be stored whole.

    Attributes:
        keys: Directions of keys, [B, H, C, D] fp16.
        whole_key_slots: The slot of each token whose keys are stored whole, [B, H, R] int32, -1 for none.
        values: Directions of values, [B, H, C, D] fp16.
        whole_value_slots: The slot of each token whose values are stored whole, likewise.
    """

    keys: Tensor
    whole_key_slots: Tensor
    values: Tensor
    whole_value_slots: Tensor


class MiniCacheCodes(NamedTuple):
    """The tensors of one layer.

    Attributes:
        shared: What both layers read, in the first layer; `()` in the second.
        key_scale: Norms of the keys of this layer, [B, H, C, 1] fp16.
        whole_keys: Its keys that are stored whole, [B, H, R, D] fp16.
        value_scale: Norms of its values, like `key_scale`.
        whole_values: Its values that are stored whole, like `whole_keys`.
    """

    shared: SharedCodes | tuple[()]
    key_scale: Tensor
    whole_keys: Tensor
    value_scale: Tensor
    whole_values: Tensor


def _check_start(name: str, start: object) -> None:
    if isinstance(start, bool) or not isinstance(start, int | float):
        raise KVPolicyTypeError(f"{name} must be a fraction of the layers or the index of one, got {start!r}; try 0.5.")
    if isinstance(start, float) and not 0 <= start <= 1:
        raise KVPolicyError(f"{name} must be between 0 and 1, got {start!r}; try 0.5.")
    if start < 0:
        raise KVPolicyError(f"{name} must be at least 0, got {start!r}; try 0.5.")


@strategy
class MiniCache(SingleStage):
    """Store one direction for the keys of two neighboring layers, one for their values, and the norms of each layer.

    From the middle of a model on, a token's keys in a layer and in the next one point in similar directions, and so do
    its values. So two layers store one direction, between both on the sphere, and each layer its own norms. Tokens of
    which the directions differ most are stored whole in both layers. Layers before `start` store every token in full
    precision, and so does a last layer without a partner.

    Args:
        start: The first layer that has a partner: a fraction of the model's depth (float), or an index (int).
        t: Where the shared direction lies on the arc from the first layer to the second, from 0 to 1.
        keep: The fraction of a head's encoded tokens that are stored whole, those of the largest angle; rounded up.
        residual_length: How many of the newest tokens always stay in full precision. `auto`: one for every 32 tokens of
            the budget, less the block if `block_size` is `auto` too; at most 32.
        block_size: How many tokens are encoded at a time during decode. `auto`: one for every 32 tokens of the budget,
            at least 1 and at most 32.

    Raises:
        KVPolicyTypeError: If a value is of another type.
        KVPolicyError: If a value is out of range.

    Examples:
        >>> from kvpolicy import Policy
        >>> Policy.parse("streaming+minicache:keep=0.1@0.2").codec.keep
        0.1
        >>> MiniCache().groups(ModelInfo(layers=7, heads=2, head_dim=64)), MiniCache(start=1).pairs((0, 1, 2, 3), 4)
        (((3, 4), (5, 6)), ((1, 2),))

    Source:
        MiniCache (arXiv:2405.14366), Section 4. The authors' repository contains no code. Differences:

        - The paper keeps the tokens whose distance exceeds a threshold between the smallest and the largest one, with
          the constant .05, which read literally marks the closest tokens, or almost all. Here, the number of tokens is
          fixed, so that bytes are known before and shapes do not change.
        - Keys and values, and each head, have tokens of their own that are stored whole. Tokens that are encoded in
          decoding compete with those of the prompt; one that is no longer among them still has its direction.
        - The paper merges generated tokens too, but not the newest ones of a block; here, the full-precision buffer
          holds the newest. A pair encodes a block once both layers have it.
        - Angles are computed by the arc tangent of two arguments, for the digits of small ones. Opposite directions
          take their line, and a zero vector has the direction of the other layer.
        - Directions, norms and whole vectors are rounded to fp16.
        - With sliding-window layers in between, the layers of a pair are neighbors among the others.
    """

    start: float | int = checked(_check_start, 0.5)
    t: float = between(0, 1, 0.6)
    keep: float = between(0, 1, 0.05)
    residual_length: AutoInt = least(0, "auto")
    block_size: AutoInt = least(1, "auto")

    @property
    def traits(self) -> Traits:
        """Tokens are encoded in blocks."""
        return self.traits_for(None)

    def traits_for(self, tokens: int | None) -> Traits:
        residual, block = buffer_sizes(tokens, residual=self.residual_length, block=self.block_size)
        # Fewer tokens than that at a time, but of two layers and in fp64; see `write_side`.
        return Traits(block=block, residual=residual, at_once=ENCODED_AT_ONCE // 2, groups=self)

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if no two layers of the model are paired."""
        if not self.groups(model):
            raise KVPolicyError(
                f"MiniCache.start must leave two layers of the model's {model.depth} to be paired, got {self.start}; "
                "try 0."
            )

    def check_others(self, others: Others) -> None:
        """Refuse parts that may keep other tokens in one layer than in the next, where layers share what they store."""
        if not others.same_in_layers:
            raise KVPolicyError(
                f"The selector must keep the same tokens in every layer and head to be combined with {self}, which "
                f"stores a part of two layers once, got {others.selector}; try full, window or streaming."
            )
        if not others.even_budgets:
            raise KVPolicyError(
                f"The allocator must give every layer and head the same budget to be combined with {self}, which "
                f"stores a part of two layers once, got {others.allocator}; try uniform."
            )
        if not others.reads_all:
            raise KVPolicyError(
                f"The reader must read every token to be combined with {self}, whose codes are written after both "
                f"layers of a pair have run, got {others.reader}; try all."
            )

    def groups(self, model: ModelInfo) -> tuple[tuple[int, ...], ...]:
        """The pairs of layers, by their indices in the model."""
        return self.pairs(model.indices, model.depth)

    def pairs(self, layers: tuple[int, ...], depth: int) -> tuple[tuple[int, ...], ...]:
        """The pairs of layers in a model of `depth` layers, of which `layers` are under the policy."""
        first = self.start if isinstance(self.start, int) else int(self.start * depth)
        paired = [index for index in layers if index >= first]
        return tuple(zip(paired[::2], paired[1::2], strict=False))

    def codec_at(self, number: int | None) -> Codec:
        """Full precision for a layer without a partner, else one side of a pair."""
        return Plain() if number is None else MiniCacheLayer(pair=self, number=number)

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> MiniCacheCodes:
        """Empty codes of a layer that has no partner: its own directions, and nothing whole."""
        return alloc_codes((batch, heads, slots, head_dim), 0, 0, device)

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        """Encode tokens of a layer that has no partner into slots, in place; see `Stage.write`."""
        self.write_layers((store,), (keys,), (values,), slots, write_mask, occupied)

    def write_layers(
        self,
        stores: tuple[StageStore, ...],
        keys: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
        slots: Tensor,
        write_mask: Tensor,
        occupied: Tensor,
    ) -> None:
        """Encode tokens of one layer, or of both layers of a pair, in place; see `GroupStage.write_group`."""
        if slots.shape[-1] == 0 or occupied.shape[-1] == 0:
            return
        for side_of, vectors in ((keys_of, keys), (values_of, values)):
            sides = [side_of(store) for store in stores]
            write_side(sides, vectors, slots, write_mask, occupied, t=self.t, fraction=self.keep)

    def keys(self, store: StageStore, at: At) -> Tensor:
        return read_side(keys_of(store), at)

    def values(self, store: StageStore, at: At) -> Tensor:
        return read_side(values_of(store), at)

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        """Norms times the products of queries with every direction; see `Stage.score`."""
        assert rope is None, "keys are encoded as attention sees them"
        return score_side(keys_of(store), queries)

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        """The sum of all directions, weighted by `weights` times norms; see `Stage.mix`."""
        return mix_side(values_of(store), weights)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class MiniCacheLayer(SingleStage):
    """One of the two layers of a pair.

    Args:
        pair: The codec of the policy.
        number: 0 for the first layer, which stores the directions, 1 for the second.
    """

    pair: MiniCache
    number: int

    def __repr__(self) -> str:
        """The codec of the policy, as messages name it."""
        return repr(self.pair)

    def __str__(self) -> str:
        """The same in a spec."""
        return str(self.pair)

    @property
    def traits(self) -> Traits:
        """The traits of the pair."""
        return self.traits_for(None)

    def traits_for(self, tokens: int | None) -> Traits:
        return self.pair.traits_for(tokens)._replace(groups=None)

    def layout(self, tokens: int) -> Layout:
        """The layout of the pair."""
        return self.pair.layout(tokens)

    @property
    def first(self) -> MiniCacheLayer:
        """The first layer of the pair."""
        return MiniCacheLayer(pair=self.pair, number=0)

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> MiniCacheCodes:
        """Empty codes of this layer for `slots` slots."""
        whole = math.ceil(self.pair.keep * slots)
        return alloc_codes((batch, heads, slots, head_dim), self.number, whole, device)

    def shared(self, codes: MiniCacheCodes) -> SharedCodes | tuple[()]:
        """The directions of the first layer, and which tokens are stored whole."""
        return codes.shared

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        """Not called: both layers are written at once."""
        raise AssertionError("the layers of a pair are written together, by write_group")

    def write_group(
        self,
        stores: tuple[StageStore, ...],
        keys: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
        slots: Tensor,
        write_mask: Tensor,
        occupied: Tensor,
    ) -> None:
        """Encode tokens into slots of both layers, in place; see `GroupStage.write_group`."""
        self.pair.write_layers(stores, keys, values, slots, write_mask, occupied)

    def keys(self, store: StageStore, at: At) -> Tensor:
        """Keys of this layer in the slots `at`, [B, H, n, D] fp32."""
        return self.pair.keys(store, at)

    def values(self, store: StageStore, at: At) -> Tensor:
        """Values of this layer in the slots `at`, [B, H, n, D] fp32."""
        return self.pair.values(store, at)

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        return self.pair.score(store, queries, rope)

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        return self.pair.mix(store, weights)


def alloc_codes(
    shape: tuple[int, int, int, int], number: int, whole: int, device: torch.device | str
) -> MiniCacheCodes:
    """Empty codes of the layer with this number in its pair, of B rows, H heads, C slots and D channels."""
    batch, heads, slots, dim = shape

    def halves(count: int, width: int) -> Tensor:
        return torch.zeros(batch, heads, count, width, dtype=torch.float16, device=device)

    def none() -> Tensor:
        return torch.full((batch, heads, whole), -1, dtype=torch.int32, device=device)

    return MiniCacheCodes(
        shared=() if number else SharedCodes(halves(slots, dim), none(), halves(slots, dim), none()),
        key_scale=halves(slots, 1),
        whole_keys=halves(whole, dim),
        value_scale=halves(slots, 1),
        whole_values=halves(whole, dim),
    )


def keys_of(store: StageStore) -> Side:
    """The stored keys of a layer."""
    codes: MiniCacheCodes = store.codes
    shared: Any = codes.shared or store.shared
    return Side(shared.keys, shared.whole_key_slots, codes.key_scale, codes.whole_keys)


def values_of(store: StageStore) -> Side:
    """The stored values of a layer."""
    codes: MiniCacheCodes = store.codes
    shared: Any = codes.shared or store.shared
    return Side(shared.values, shared.whole_value_slots, codes.value_scale, codes.whole_values)


def to_half(x: Tensor) -> Tensor:
    """Round to fp16, clipped to its range."""
    return x.float().clamp(-FP16, FP16).half()


def unit_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Directions [..., D] and norms [..., 1] of vectors [..., D], fp64; a zero vector has the direction 0."""
    x = x.double()
    norm = x.square().sum(-1, keepdim=True).sqrt()
    return x / norm.masked_fill(norm == 0, 1), norm


def angle_between(one: Tensor, other: Tensor) -> Tensor:
    """The angle of unit vectors [..., D], in [0, pi], fp64; 0 where one of them is 0."""
    # Not the arc cosine of their product, which loses half of the digits of small angles.
    angle = 2 * torch.atan2((one - other).norm(dim=-1), (one + other).norm(dim=-1))
    return angle.masked_fill((one == 0).all(-1) | (other == 0).all(-1), 0)


def interpolate(one: Tensor, other: Tensor, t: float) -> Tensor:
    """Unit vectors on the arc from `one` to `other` [..., D], at the fraction `t` of it.

    Where a vector is 0, the result is the other one. Opposite vectors have no arc: their line is taken instead, and
    `one` where it passes through 0.

    Examples:
        >>> interpolate(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), 0.5).float()
        tensor([0.7071, 0.7071])
        >>> interpolate(torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0]), 0.5).tolist()
        [1.0, 0.0]
    """
    one = _unless_zero(one.double(), other.double())
    other = _unless_zero(other.double(), one)
    angle = angle_between(one, other)[..., None]
    sine = angle.sin()
    is_line = sine < _PARALLEL
    sine = sine.masked_fill(is_line, 1)
    of_one = torch.where(is_line, 1 - t, ((1 - t) * angle).sin() / sine)
    of_other = torch.where(is_line, t, (t * angle).sin() / sine)
    mixed, norm = unit_vectors(of_one * one + of_other * other)
    return torch.where(norm < _PARALLEL, one, mixed)


def _unless_zero(x: Tensor, other: Tensor) -> Tensor:
    """Vectors [..., D], replaced by the other ones where they are zero."""
    return torch.where((x == 0).all(-1, keepdim=True), other, x)


def write_side(
    sides: Sequence[Side],
    vectors: Sequence[Tensor],
    slots: Tensor,
    write_mask: Tensor,
    occupied: Tensor,
    *,
    t: float,
    fraction: float,
) -> None:
    """Encode the keys, or the values, of tokens in both layers of a pair, in place; see `GroupStage.write_group`.

    Args:
        sides: What each layer stores; all have the same directions.
        vectors: Vectors of each layer, [B, H, n, D].
        slots: The slot of each token, [B, H, n] int64.
        write_mask: Which tokens are written, [B, H, n] bool.
        occupied: Which slots hold a token that stays, [B, H, C] bool.
        t: How far directions lie from the first layer to the second.
        fraction: The fraction of a head's encoded tokens that are stored whole.
    """
    angles: list[Tensor] = []
    for start in range(0, slots.shape[-1], _AT_ONCE):
        at = slice(start, start + _AT_ONCE)
        halves = [to_half(x[:, :, at]) for x in vectors]
        units = [unit_vectors(x) for x in halves]
        angles.append(angle_between(units[0][0], units[-1][0]).float())
        where = slots[..., at], write_mask[..., at]
        put(sides[0].directions, to_half(interpolate(units[0][0], units[-1][0], t)), *where)
        for side, (_, norm) in zip(sides, units, strict=True):
            put(side.norm, to_half(norm), *where)
    if sides[0].whole_slots.shape[-1]:
        _keep_whole(sides, vectors, torch.cat(angles, -1), slots, write_mask, occupied, fraction)


def _keep_whole(
    sides: Sequence[Side],
    vectors: Sequence[Tensor],
    angles: Tensor,
    slots: Tensor,
    write_mask: Tensor,
    occupied: Tensor,
    fraction: float,
) -> None:
    """Store the tokens of largest angle whole, among those that are stored whole and stay, and those written."""
    table = sides[0].whole_slots
    entries = table.shape[-1]
    held = table.long()
    stays = (held >= 0) & occupied.gather(-1, held.clamp_min(0))
    before = angle_between(*(unit_vectors(side.whole)[0] for side in (sides[0], sides[-1]))).float()
    every = torch.cat([before.masked_fill(~stays, -1), angles.masked_fill(~write_mask, -1)], -1)
    # Stable: of equal angles, those that are stored whole stay, and then the tokens that leave the buffer first.
    order = every.argsort(dim=-1, descending=True, stable=True)[..., :entries]
    count = ((occupied.sum(-1) + write_mask.sum(-1)).double() * fraction).ceil()
    chosen = (torch.arange(entries, device=order.device) < count[..., None]) & (every.gather(-1, order) >= 0)
    chosen = torch.where(write_mask.any(-1, keepdim=True), chosen, False)
    found = torch.cat([held, slots], -1).gather(-1, order).masked_fill(~chosen, -1)
    is_written = write_mask.any(-1, keepdim=True)
    table.copy_(torch.where(is_written, found, held))
    is_old = (order < entries)[..., None]
    for side, x in zip(sides, vectors, strict=True):
        old = take(side.whole, order.clamp_max(entries - 1))
        new = to_half(take(x, (order - entries).clamp_min(0)))
        kept = torch.where(is_old, old, new).masked_fill(~chosen[..., None], 0)
        side.whole.copy_(torch.where(is_written[..., None], kept, side.whole))


def read_side(side: Side, at: At) -> Tensor:
    """Vectors of the slots `at`, [B, H, n, D] fp32."""
    near = take(side.directions, at).float() * take(side.norm, at).float()
    if not side.whole.shape[2]:
        return near
    entry = take(_entries(side), at)[..., None]
    whole = take(side.whole, entry.squeeze(-1).clamp_min(0)).float()
    return torch.where(entry >= 0, whole, near)


def _entries(side: Side) -> Tensor:
    """Which entry of the tokens stored whole a slot has, [B, H, C] int64, -1 for none."""
    slots = side.norm.shape[2]
    entries = side.whole.shape[2]
    table = side.whole_slots[..., :entries].long()
    number = torch.arange(entries, device=table.device).expand_as(table)
    # One slot more, which unused entries write to.
    found = table.new_full((*table.shape[:2], slots + 1), -1)
    return found.scatter(-1, torch.where(table < 0, slots, table), number)[..., :slots]


def score_side(side: Side, queries: Tensor) -> Tensor:
    """Products of queries [B, H, G, D] with the keys of every slot, [B, H, G, C] fp32, of which none is restored."""
    slots = side.norm.shape[2]
    parts = [products(queries, side.directions[:, :, at].to(queries.dtype)) for at in chunks(slots)]
    near = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)) * side.norm.float().transpose(-1, -2)
    if not side.whole.shape[2]:
        return near
    entry = _entries(side)[:, :, None].expand_as(near)
    whole = products(queries, side.whole.to(queries.dtype))
    return torch.where(entry >= 0, whole.gather(-1, entry.clamp_min(0)), near)


def mix_side(side: Side, weights: Tensor) -> Tensor:
    """Values of every slot, weighted by `weights` [B, H, G, C] and summed, [B, H, G, D] fp32; none is restored."""
    slots = side.norm.shape[2]
    entries = side.whole.shape[2]
    table = side.whole_slots[..., :entries].long()
    at_whole = torch.where(table < 0, slots, table)[:, :, None].expand(-1, -1, weights.shape[2], -1)
    padded = F.pad(weights, (0, 1))
    of_whole = padded.gather(-1, at_whole)
    near = padded.scatter(-1, at_whole, 0)[..., :slots] if entries else weights
    near = (near.float() * side.norm.float().transpose(-1, -2)).to(weights.dtype)
    sums = [matmul(near[..., at], side.directions[:, :, at].to(weights.dtype)).float() for at in chunks(slots)]
    return sum(sums, matmul(of_whole, side.whole.to(weights.dtype)).float())
