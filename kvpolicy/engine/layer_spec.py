"""The parts of a policy that one layer has."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpolicy.engine.output_norms import Projection
from kvpolicy.engine.reading import in_host_memory
from kvpolicy.engine.rotary import Rope
from kvpolicy.mergers.drop import Drop
from kvpolicy.protocols import (
    Codec,
    DecodeMode,
    HeadAllocator,
    Merger,
    MergerTraits,
    Needs,
    Reader,
    ReaderTraits,
    Selector,
    Stage,
    Traits,
)
from kvpolicy.readers.all import ReadAll

_DROP = Drop()
_NONE = Needs()
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
        rope: The rotary embedding, if keys are coded unrotated or rebuilt, or the selector needs vectors without it.
        projection: Reads the output projection, if the selector needs the norms of values behind it.
        allocator_needs: The statistics of a row's first prompt that the allocator needs.
        latent: How many numbers of a key are its value, where none is held; else 0. See `LayerShape`.
        grows: Whether generated tokens are kept in addition to the budget.
        key_rope: The rotary embedding, if keys are coded unrotated.
        needs: What the selector needs.
        prompt_needs: The statistics of a prompt that the selector and the merger need.
        stages: The stages of the codec.
        codec_traits: Traits of the codec.
        merger_traits: Traits of the merger.
        reader_traits: Traits of the reader.
        host: Whether keys and values lie in host memory.
        merges_in_steps: Whether decode steps merge what they evict; a cache that grows evicts nothing.
    """

    layer_idx: int
    selector: Selector
    codec: Codec
    decode: DecodeMode = "evict"
    merger: Merger = _DROP
    reader: Reader = _READ_ALL
    heads: HeadAllocator | None = None
    rope: Rope | None = None
    projection: Projection | None = None
    allocator_needs: Needs = _NONE
    latent: int = 0

    grows: bool = field(init=False)
    key_rope: Rope | None = field(init=False)
    needs: Needs = field(init=False)
    prompt_needs: Needs = field(init=False)
    stages: tuple[Stage, ...] = field(init=False)
    codec_traits: Traits = field(init=False)
    merger_traits: MergerTraits = field(init=False)
    reader_traits: ReaderTraits = field(init=False)
    host: bool = field(init=False)
    merges_in_steps: bool = field(init=False)

    def __post_init__(self) -> None:
        """Ask the parts once for what a step needs to know of them."""
        facts = {
            "grows": self.decode == "grow",
            "key_rope": self.rope if self.codec.traits.key_space == "unrotated" else None,
            "needs": self.selector.needs,
            "prompt_needs": self.selector.needs | self.merger.needs,
            "stages": self.codec.stages,
            "codec_traits": self.codec.traits,
            "merger_traits": self.merger.traits,
            "reader_traits": self.reader.traits,
            "host": in_host_memory(self.reader, self.layer_idx),
            "merges_in_steps": self.merger.traits.when == "always" and self.decode != "grow",
        }
        for name, fact in facts.items():
            object.__setattr__(self, name, fact)
