"""The interface of a codec: how a kept token is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvpolicy.statistics.statistic import KeptStatistic

Codes = Any
"""A NamedTuple of a stage's tensors for one layer; the empty tuple where nothing is coded."""

Calibration = Any
"""A NamedTuple of calibrated tensors that belong to the model; the empty tuple where there are none."""


ALL_HEADS = slice(None)
"""The heads of a rank that holds all of them."""

NO_STATISTICS: Mapping[type[KeptStatistic], Tensor] = {}
"""The statistics of a codec that needs none."""


class Layout(NamedTuple):
    """How the slots of a layer are stored.

    Attributes:
        exact: Slots of the full-precision buffer, in the model's dtype. They come first.
        coded: Slots of each of the codec's stages, in order.
    """

    exact: int
    coded: tuple[int, ...] = ()

    @property
    def slots(self) -> int:
        """The number of slots."""
        return self.exact + sum(self.coded)

    def starts(self) -> list[int]:
        """The first slot of each stage."""
        return [self.exact + sum(self.coded[:stage]) for stage in range(len(self.coded))]


class ModelInfo(NamedTuple):
    """Description of a model for parts of a policy, before anything runs.

    Attributes:
        layers: Number of layers under the policy.
        heads: KV heads of a layer, on all ranks together.
        head_dim: Size of a key and of a value.
        weights: Weight fingerprint: samples of the model's weights, [n] fp32, which a calibration file is compared
            with; None if only a config is at hand.
        evictable: Indices of these layers in the model; empty if they are the first ones.
        total: Number of all layers; 0 if every layer is under the policy.
        hidden: Size of the hidden states; 0 if it is not known.
    """

    layers: int
    heads: int
    head_dim: int
    weights: Tensor | None = None
    evictable: tuple[int, ...] = ()
    total: int = 0
    hidden: int = 0

    @property
    def depth(self) -> int:
        """Number of all layers of the model."""
        return self.total or self.layers

    @property
    def indices(self) -> tuple[int, ...]:
        """The layers under the policy, as passed to `Stage.load_calibration`."""
        return self.evictable or tuple(range(self.layers))


class Demotion(Protocol):
    """Which token leaves the full-precision buffer, or a stage, first: what a codec hands over if it is not the oldest.

    The newest `Traits.residual` tokens, and pinned ones, stay whatever it says.
    """

    words: ClassVar[str] = ""
    """A sentence about it for `kvpolicy explain`; empty for nothing to say."""

    @property
    def recodes(self) -> bool:
        """Whether all tokens are encoded again, instead of one block, whenever the buffer is full; by default not."""
        return False

    def order(self, positions: Tensor, priority: Tensor) -> Tensor:
        """Indices of the tokens of each head, first to leave first, [B, H, n] int64.

        Args:
            positions: Original positions, [B, H, n] int32.
            priority: The selector's priorities, [B, H, n] fp32, finite.
        """
        ...


class Search(Protocol):
    """How the stages of a codec choose which slots a step reads."""

    @property
    def option(self) -> str:
        """The option of the codec that turns it on."""
        ...


class DiffersByLayer(Protocol):
    """A codec whose options stand for a codec of each layer, once the model is known.

    Without a model, its stages are those of a layer that has the mean of what layers have.
    """

    def by_layer(self, model: ModelInfo) -> Mapping[int, Codec]:
        """The codec of each layer under the policy, by its index in the model.

        Its traits and layouts are those of this codec, and it does not differ by layer itself.

        Raises:
            KVPolicyError: If they cannot be used with the model.
        """
        ...


class GroupsLayers(Protocol):
    """A codec that stores a part of what several layers hold once, in the first of them.

    The layers of a group hold the same tokens in the same slots. So `Codec.check_others` refuses parts that may keep
    other tokens in one layer than in the next.
    """

    def groups(self, model: ModelInfo) -> tuple[tuple[int, ...], ...]:
        """The groups: indices of layers under the policy, ascending; a layer is in one group at most."""
        ...

    def codec_at(self, number: int | None) -> Codec:
        """The codec of a layer that has this number in its group, from 0; None for a layer in no group.

        The stages of a layer in a group are `GroupStage`s, and its traits and layouts do not depend on the number.
        """
        ...


class Others(NamedTuple):
    """The parts that a codec is combined with, and what it may ask of them.

    Attributes:
        allocator: The allocator.
        selector: The selector.
        reader: The reader.
        same_in_heads: Whether all heads of a layer keep the same tokens.
        same_in_layers: Whether all layers and heads keep the same tokens, given the same budget.
        even_budgets: Whether all layers and heads have the same budget.
        reads_all: Whether a step reads every token.
    """

    allocator: object
    selector: object
    reader: object
    same_in_heads: bool
    same_in_layers: bool
    even_budgets: bool
    reads_all: bool


class Traits(NamedTuple):
    """Properties of a codec that the engine must know.

    Attributes:
        block: How many tokens are demoted from the full-precision buffer at a time in decode; 0 if nothing is encoded.
            If it depends on the tokens of a row (`SizedCodec`), the largest number; the same holds for `residual`.
        group_size: How many slots share parameters; a prompt's tokens are demoted in multiples of it. 1 if the code of
            a slot depends on its own token alone.
        residual: How many of the newest tokens always stay in full precision.
        key_space: Whether keys are encoded as attention sees them (`rotated`) or with the rotary embedding undone
            (`unrotated`).
        demotion: Which token leaves a part first, where it is not the oldest one; None for the oldest.
        pins: Tokens of the first prompt that stay in full precision: its first ones (`first`), those with its largest
            hidden activations (`massive`), or its newest (`newest`), whose slots are then reserved as dictionary slots
            for the codec.
        pinned: The most tokens that are pinned.
        search: How `Stage.score` chooses the slots that a step reads, as a reader does, and hides the others; None if
            it hides none.
        per_head: Names of the fields of the codes with one entry per head, [B, H, X, ...], where X does not depend on
            the slots; every other one has one entry per slot, which depends on nothing but its own token and the
            entries of its head. Such slots may lie in pages of heads with budgets of their own. None if slots share
            anything else, or if calibrated tensors differ by head.
        at_once: The most tokens of a head that a write takes to fp32 at a time; 0 for all of them.
        by_layer: Gives each layer of a model a codec of its own; None if all layers have this one.
        groups: Forms groups of layers that store a part of what they hold together; None if each stores its own.
    """

    block: int = 0
    group_size: int = 1
    residual: int = 0
    key_space: Literal["rotated", "unrotated"] = "rotated"
    demotion: Demotion | None = None
    pins: Literal["none", "first", "massive", "newest"] = "none"
    pinned: int = 0
    search: Search | None = None
    per_head: tuple[str, ...] | None = None
    at_once: int = 0
    by_layer: DiffersByLayer | None = None
    groups: GroupsLayers | None = None


class StageStore(NamedTuple):
    """The tensors of one stage of one layer.

    Attributes:
        codes: The result of `Stage.alloc`, which counts as the cache's.
        calibration: The result of `Stage.load_calibration`, which belongs to the model.
        atoms: Keys, in the codec's key space, and values of the dictionary slots, each [B, H, W, D] in the model's
            dtype, zero for an empty slot; None unless `Traits.pins` is `newest` and slots were reserved.
        statistics: What is kept of each of `Codec.statistics`, by its class.
        page_slots: Slots of an average head in all rows if every page of the codes is read as a row of one head; None
            if rows and heads of the codes are those of the cache.
        shared: What the first layer of a group stores for all of its layers, the result of `GroupStage.shared`; None
            outside of groups.
    """

    codes: Codes
    calibration: Calibration = ()
    atoms: tuple[Tensor, Tensor] | None = None
    statistics: Mapping[type[KeptStatistic], Tensor] = NO_STATISTICS
    page_slots: int | None = None
    shared: Codes | None = None


At = slice | Tensor
"""Coded slots: a range that begins and ends at a multiple of the group size, or indices per head, [B, H, n] int64."""


@runtime_checkable
class RotaryView(Protocol):
    """The rotary embedding of a stage's keys, for codecs whose key space is `unrotated`."""

    @property
    def occupied(self) -> Tensor:
        """Which slots hold a token, [B, H, C] bool."""
        ...

    def keys(self, keys: Tensor, at: At) -> Tensor:
        """Rotate keys of the slots `at`, [B, H, n, D], to their positions, as attention sees them."""
        ...

    def queries(self, queries: Tensor, distance: int) -> Tensor:
        """Rotate the newest token's queries, [B, H, G, D], as if it stood `distance` tokens after unrotated keys."""
        ...


@runtime_checkable
class Stage(Protocol):
    """A part of a layer's slots in which every token is coded in the same way.

    Every tensor of the codes is [B, H or 1, X, ...], or of fewer heads if these share codes, where X counts slots,
    groups of slots, or something that does not depend on them; the tensors of a longer stage begin like those of a
    shorter one. All methods but `load_calibration` and `alloc` are traceable: no host sync, no data-dependent shape.
    """

    __slots__ = ()

    def load_calibration(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> Calibration:
        """A layer's calibrated tensors, shared by all caches; by default there are none.

        Args:
            layer_idx: Index of the layer.
            device: Device of the tensors.
            heads: Which of the model's KV heads this rank holds; the others are left out.
        """
        return ()

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> Codes:
        """Empty codes for `slots` slots; on the device `meta` too, where only their sizes count."""
        ...

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        """Encode tokens into slots, in place.

        For a head without an occupied slot, per-sequence parameters may be fitted again to the tokens written.

        Args:
            store: The stage's tensors.
            keys: [B, H, n, D], in the codec's key space.
            values: [B, H, n, D].
            slots: Slot of each token in the stage, [B, H, n] int64, distinct within a head where written. Empty groups
                of slots are filled one after the other, so that at most n / `Traits.group_size` of them, rounded up,
                get their first token.
            write_mask: Which of the n tokens are written, [B, H, n] bool.
            occupied: Which slots hold a token that stays, [B, H, C] bool.
        """
        ...

    def keys(self, store: StageStore, at: At) -> Tensor:
        """Keys of the slots `at`, in the codec's key space, [B, H, n, D] fp32."""
        ...

    def values(self, store: StageStore, at: At) -> Tensor:
        """Values of the slots `at`, [B, H, n, D] fp32."""
        ...

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        """Products of queries [B, H, G, D] with the key of every slot, [B, H, G, C] fp32; -inf hides a slot."""
        ...

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        """Values of every slot, weighted by `weights` [B, H, G, C] and summed in its dtype, [B, H, G, D] fp32."""
        ...


@runtime_checkable
class Codec(Protocol):
    """How is a kept token stored?

    A layer's slots are a full-precision buffer, which the cache owns and where every new token is written, and stages,
    which the codec describes and to which tokens are demoted in blocks, from one stage to the next.

    A class that inherits from it stores every token in full precision, but for what it overrides. Most codecs have one
    stage, which is the codec itself: `kvpolicy.helpers.SingleStage`. An object that has all members is accepted
    whatever its class. The optional ability is `SizedCodec`.
    """

    __slots__ = ()

    @property
    def traits(self) -> Traits:
        """Properties that the engine must know; by default, nothing is encoded."""
        return Traits()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The coded stages, in the order in which tokens reach them; by default there are none."""
        return ()

    @property
    def statistics(self) -> tuple[KeptStatistic, ...]:
        """The statistics of prompts that its stages need to encode tokens; by default none.

        Codes that depend on them do not fit the pages of heads with budgets of their own.
        """
        return ()

    def layout(self, tokens: int) -> Layout:
        """Slots for a layer, or a row of it, that may hold `tokens` tokens; by default all in full precision."""
        return Layout(tokens)

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if a model's keys and values cannot be coded; by default they can."""

    def check_others(self, others: Others) -> None:
        """Raise KVPolicyError if it does not work with the other parts of a policy; by default it does."""


@runtime_checkable
class SizedCodec(Codec, Protocol):
    """A codec whose full-precision buffer depends on the tokens of a row."""

    def traits_for(self, tokens: int | None) -> Traits:
        """The traits for a row of `tokens` tokens, or with the largest buffer for None.

        Only `block` and `residual` may depend on `tokens`, and neither may decrease as it grows; `traits` has the
        largest of both. `layout(tokens)` must agree with them.
        """
        ...


def fits_pages(codec: Codec) -> bool:
    """Whether a codec can encode tokens in pages, each of which belongs to one head: every token by itself.

    Examples:
        >>> from kvpolicy import KIVI, TokenWise
        >>> fits_pages(TokenWise()), fits_pages(KIVI())
        (True, False)
    """
    traits = codec.traits
    alone = traits.per_head is not None and traits.group_size == 1 and traits.pins == "none"
    ordinary = traits.key_space == "rotated" and traits.demotion is None and traits.search is None
    return alone and ordinary and not codec.statistics and len(codec.stages) == 1


def traits_for(codec: Codec, tokens: int) -> Traits:
    """The traits of any codec for a row of `tokens` tokens.

    Args:
        codec: The codec; one that is not a `SizedCodec` has the same traits for any row.
        tokens: The most tokens that the row may hold.

    Examples:
        >>> from kvpolicy import TokenWise
        >>> traits_for(TokenWise(), 500).block, traits_for(TokenWise(block_size=4), 500).block
        (15, 4)
    """
    return codec.traits_for(tokens) if isinstance(codec, SizedCodec) else codec.traits


def differs_by_layer(codec: Codec) -> bool:
    """Whether the layers of a model have codecs of their own."""
    return codec.traits.by_layer is not None


@runtime_checkable
class GroupStage(Stage, Protocol):
    """A stage of a layer in a group. Its `write` is not called: a block is encoded for all layers at once."""

    __slots__ = ()

    @property
    def first(self) -> Stage:
        """The same stage in the first layer of the group."""
        ...

    def shared(self, codes: Codes) -> Codes:
        """The part of the codes of the first layer that the stages of all layers read, as `StageStore.shared`."""
        ...

    def write_group(
        self,
        stores: tuple[StageStore, ...],
        keys: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
        slots: Tensor,
        write_mask: Tensor,
        occupied: Tensor,
    ) -> None:
        """Encode tokens into the slots of every layer, in place; see `Stage.write`.

        Args:
            stores: The tensors of the stage in each layer.
            keys: Keys of the tokens in each layer, [B, H, n, D].
            values: Values likewise.
            slots: Slot of each token, the same in all layers, [B, H, n] int64.
            write_mask: Which of the n tokens are written, [B, H, n] bool.
            occupied: Which slots hold a token that stays, [B, H, C] bool.
        """
        ...
