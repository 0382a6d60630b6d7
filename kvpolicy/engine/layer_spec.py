"""The parts of a policy that one layer has."""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.engine.rotary import Rope
from kvpolicy.mergers.drop import Drop
from kvpolicy.protocols import Codec, DecodeMode, HeadAllocator, Merger, Needs, Reader, Selector
from kvpolicy.readers.all import ReadAll

_DROP = Drop()
_READ_ALL = ReadAll()


@dataclass(frozen=True)
class LayerSpec:
    """The parts of a policy in one layer.

    Attributes:
        layer_idx: Index of the layer in the model.
        selector: The layer's selector.
        codec: The layer's codec.
        decode: Whether generated tokens are kept in addition to the budget, `"grow"`, or evict others, `"evict"`.
        merger: The layer's merger; by default, evicted tokens are dropped.
        reader: The layer's reader; by default, every slot is read.
        heads: Divides the pages of a row among its heads; None if all heads have equally many slots.
        rope: The rotary embedding, if keys are coded unrotated or the selector needs queries without it.
    """

    layer_idx: int
    selector: Selector
    codec: Codec
    decode: DecodeMode = "evict"
    merger: Merger = _DROP
    reader: Reader = _READ_ALL
    heads: HeadAllocator | None = None
    rope: Rope | None = None

    @property
    def grows(self) -> bool:
        """Whether generated tokens are kept in addition to the budget."""
        return self.decode == "grow"

    @property
    def key_rope(self) -> Rope | None:
        """The rotary embedding, if keys are coded unrotated."""
        return self.rope if self.codec.traits.key_space == "unrotated" else None

    @property
    def prompt_needs(self) -> Needs:
        """The statistics of a prompt that the selector and the merger need."""
        return self.selector.needs | self.merger.needs

    @property
    def merges_in_steps(self) -> bool:
        """Whether decode steps merge what they evict; a cache that grows evicts nothing."""
        return self.merger.traits.when == "always" and not self.grows
