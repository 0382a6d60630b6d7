"""Keys and values of different sizes, or keys alone: a codec that encodes both apart is given each in its own size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from kvpolicy.codecs.base import inner_of, keys_of, keys_only, values_of, values_only, wrapper_traits
from kvpolicy.codecs.common import SingleStage, TwoSides, mix_by_chunks
from kvpolicy.protocols import At, Codec, LayerShape, ModelInfo, RotaryView, StageStore, Traits


def sized_for(codec: Codec, shape: LayerShape) -> Codec:
    """The codec of a layer whose values have a size of their own, or are not held; see `LayerShape`.

    Args:
        codec: A codec that stores nothing in codes, or encodes keys and values apart.
        shape: The shape of the layer.
    """
    if shape.value_dim is None or not codec.stages:
        return codec
    return KeysAlone(codec) if shape.latent else Apart(codec, shape.value_dim)


def is_divisible(codec: Codec) -> bool:
    """Whether `sized_for` takes a codec."""
    return not codec.stages or isinstance(codec, TwoSides)


class ApartCodes(NamedTuple):
    """The tensors of one layer.

    Attributes:
        keys: Codes of keys; their fields of values have no slots.
        values: Codes of values; their fields of keys have no slots.
    """

    keys: Any
    values: Any


class _OverBase(SingleStage):
    """A codec in the place of its base, of which it says the same."""

    __slots__ = ()
    base: Codec

    @property
    def inner(self) -> TwoSides:
        """The base as a stage."""
        return inner_of(self.base)

    @property
    def traits(self) -> Traits:
        """Those of the base, whose codes do not fit pages here."""
        return self.traits_for(None)

    def traits_for(self, tokens: int | None) -> Traits:
        return wrapper_traits(self.base, tokens, "auto", "auto")

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if the base cannot encode the keys and values of a model."""
        self.base.check(model)

    def __str__(self) -> str:
        """The spec of the base."""
        return str(self.base)


@dataclass(frozen=True, slots=True)
class Apart(_OverBase):
    """Encode keys and values of different sizes.

    Args:
        base: The codec.
        value_dim: Size of a value.
    """

    base: Codec
    value_dim: int

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: Any) -> ApartCodes:
        keys = self.inner.alloc(batch, heads, slots, head_dim, device)
        values = self.inner.alloc(batch, heads, slots, self.value_dim, device)
        return ApartCodes(keys_only(keys), values_only(values))

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        self.inner.write_keys(keys_of(store), keys, slots, write_mask, occupied)
        self.inner.write_values(values_of(store), values, slots, write_mask, occupied)

    def keys(self, store: StageStore, at: At) -> Tensor:
        return self.inner.keys(keys_of(store), at)

    def values(self, store: StageStore, at: At) -> Tensor:
        """Values of the slots `at`, [B, H, n, value_dim] fp32."""
        return self.inner.values(values_of(store), at)

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        return self.inner.score(keys_of(store), queries, rope)

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        """Weighted sum of the values of all slots, [B, H, G, value_dim] fp32; see `Stage.mix`."""
        return self.inner.mix(values_of(store), weights)


@dataclass(frozen=True, slots=True)
class KeysAlone(_OverBase):
    """Encode keys where no values are held: what attention mixes are the keys.

    Args:
        base: The codec.
    """

    base: Codec

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: Any) -> Any:
        return keys_only(self.inner.alloc(batch, heads, slots, head_dim, device))

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        """Encode keys into slots, in place; see `Stage.write`."""
        self.inner.write_keys(store, keys, slots, write_mask, occupied)

    def keys(self, store: StageStore, at: At) -> Tensor:
        return self.inner.keys(store, at)

    def values(self, store: StageStore, at: At) -> Tensor:
        """No values, [B, H, n, 0] fp32."""
        return self.inner.keys(store, at)[..., :0]

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        return self.inner.score(store, queries, rope)

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        """Weighted sum of the keys of all slots, [B, H, G, D] fp32; see `Stage.mix`."""
        return mix_by_chunks(self.inner.keys, store, weights, self.traits.group_size)
