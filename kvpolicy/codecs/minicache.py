"""MiniCache: one direction for the vectors of two neighboring layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs.buffer import buffer_sizes
from kvpolicy.codecs.common import ENCODED_AT_ONCE, SingleStage
from kvpolicy.codecs.plain import Plain
from kvpolicy.codecs.shared_directions import Side, mix_side, read_side, score_side, write_side
from kvpolicy.protocols import At, Codec, Layout, ModelInfo, Others, RotaryView, StageStore, Traits
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.strategy import AutoInt, between, checked, least, strategy


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
