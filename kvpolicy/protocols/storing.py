"""What a codec must answer."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

Codes = Any
"""A NamedTuple of a stage's tensors for one layer; the empty tuple where nothing is coded."""

Book = Any
"""A NamedTuple of calibrated tensors that belong to the model; the empty tuple where there are none."""


ALL_HEADS = slice(None)
"""The heads of a rank that holds them all."""


class Layout(NamedTuple):
    """How a layer's slots are stored.

    Attributes:
        exact: The first so many in the model's dtype.
        coded: Then those of each of the codec's stages.
    """

    exact: int
    coded: tuple[int, ...] = ()

    @property
    def slots(self) -> int:
        """Slots in all."""
        return self.exact + sum(self.coded)

    def starts(self) -> list[int]:
        """The first slot of each stage."""
        return [self.exact + sum(self.coded[:stage]) for stage in range(len(self.coded))]


class ModelInfo(NamedTuple):
    """What a codec may know of a model before anything runs.

    Attributes:
        layers: How many layers are under the policy.
        heads: KV heads of a layer, those of all ranks.
        head_dim: Numbers of a key and of a value.
        weights: A few of the model's weights, [n] fp32, by which a calibrated file knows its model; None where only
            a config is at hand.
        evictable: Which of the model's layers these are; empty where they are the first ones.
    """

    layers: int
    heads: int
    head_dim: int
    weights: Tensor | None = None
    evictable: tuple[int, ...] = ()

    @property
    def indices(self) -> tuple[int, ...]:
        """The layers under the policy, as `Stage.open` is asked for them."""
        return self.evictable or tuple(range(self.layers))


class Traits(NamedTuple):
    """What the engine must know of a codec.

    Attributes:
        block: Tokens that leave the exact part at a time in decode; 0 where nothing is coded.
        grain: Slots that share parameters, so that a prompt's tokens come in multiples of it; 1 where a slot's code
            depends on its own token alone.
        residual: The fewest newest tokens that always stay exact.
        frame: Whether keys are coded as attention sees them (`post`) or with the rotary embedding undone (`pre`).
        order: Which token leaves a part first: the oldest (`age`), or the selector's least (`worth`).
        pins: Tokens of the first prompt that stay exact: its first ones, those that hold its largest hidden numbers
            (`massive`), or its newest, whose slots are then never used for other tokens (`newest`: the codec may use
            them as part of its dictionary).
        pinned: The most tokens that are pinned.
        recode: Whether all tokens are coded anew, instead of a block, whenever the exact part is full.
        peaks: Whether the codec must know the largest query of each channel in the prompt.
    """

    block: int = 0
    grain: int = 1
    residual: int = 0
    frame: Literal["post", "pre"] = "post"
    order: Literal["age", "worth"] = "age"
    pins: Literal["none", "first", "massive", "newest"] = "none"
    pinned: int = 0
    recode: bool = False
    peaks: bool = False


class Store(NamedTuple):
    """One stage's tensors of one layer.

    Attributes:
        codes: What `Stage.alloc` made, counted as the cache's.
        book: What `Stage.open` loaded, which belongs to the model.
        atoms: Keys, in the codec's frame, and values of the frozen slots, each [B, H, W, D] in the model's dtype, zero
            where there is none; None unless `Traits.pins` is `newest` and slots were frozen.
        peaks: Largest absolute query of each channel in the prompt, over a KV head's query heads, [B, H, D] fp32; None
            unless `Traits.peaks`.
    """

    codes: Codes
    book: Book = ()
    atoms: tuple[Tensor, Tensor] | None = None
    peaks: Tensor | None = None


At = slice | Tensor
"""Coded slots: a range that begins and ends at a multiple of the grain, or for each head its own, [B, H, n] int64."""


@runtime_checkable
class Turn(Protocol):
    """Rotary embedding of the keys of a stage, for codecs whose frame is `pre`."""

    @property
    def live(self) -> Tensor:
        """Which slots hold a token, [B, H, C] bool."""
        ...

    def keys(self, keys: Tensor, at: At) -> Tensor:
        """Rotate keys of the slots `at` [B, H, n, D] to their positions, as attention sees them."""
        ...

    def queries(self, queries: Tensor, distance: int) -> Tensor:
        """Rotate the newest token's queries [B, H, G, D] as if it stood `distance` tokens behind unrotated keys."""
        ...


@runtime_checkable
class Stage(Protocol):
    """A part of a layer's slots, in which every token is coded in one way.

    Every tensor of the codes is [B, H or 1, X, ...], where X is the slots, groups of them, or what does not depend on
    them; a longer stage's tensors begin as a shorter one's. All methods but `open` and `alloc` can be traced: no host
    sync, no shape that depends on data.
    """

    def open(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> Book:
        """A layer's calibrated tensors, shared by all caches; the empty tuple where there are none.

        Args:
            layer_idx: Which layer.
            device: Where to.
            heads: Which of the model's KV heads this rank holds: what belongs to the others is left out.
        """
        ...

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> Codes:
        """Empty codes for `slots` slots; on the device `meta` too, where only their sizes count."""
        ...

    def write(self, store: Store, keys: Tensor, values: Tensor, slots: Tensor, active: Tensor, live: Tensor) -> None:
        """Encode tokens into slots, in place.

        Where a head has no live slot, what is fixed per sequence may be fixed anew from the tokens written.

        Args:
            store: The stage's tensors.
            keys: [B, H, n, D], in the codec's frame.
            values: [B, H, n, D].
            slots: Index of each token in the stage, [B, H, n] int64, distinct within a head where active.
            active: Which of the n tokens are to be written, [B, H, n] bool.
            live: Which slots hold a token that stays, [B, H, C] bool.
        """
        ...

    def keys(self, store: Store, at: At) -> Tensor:
        """Keys of the slots `at`, in the codec's frame, [B, H, n, D] fp32."""
        ...

    def values(self, store: Store, at: At) -> Tensor:
        """Values of the slots `at`, [B, H, n, D] fp32."""
        ...

    def score(self, store: Store, queries: Tensor, turn: Turn | None) -> Tensor:
        """Products of queries [B, H, G, D] with the key of every slot, [B, H, G, C] fp32; -inf hides a slot."""
        ...

    def mix(self, store: Store, share: Tensor) -> Tensor:
        """Every slot's value, weighted by `share` [B, H, G, C] and summed in its dtype, [B, H, G, D] fp32."""
        ...


@runtime_checkable
class Codec(Protocol):
    """How is a kept token stored?

    A layer's slots are an exact part, which the cache owns and where every new token lands, and stages, which the
    codec describes and which tokens reach in blocks, from one to the next.
    """

    @property
    def traits(self) -> Traits:
        """What the engine must know."""
        ...

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The coded parts, in the order in which tokens reach them; none where nothing is coded."""
        ...

    def layout(self, tokens: int) -> Layout:
        """Slots for a layer, or a row of it, that may hold `tokens` tokens."""
        ...

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError where a model's vectors cannot be coded."""
        ...
