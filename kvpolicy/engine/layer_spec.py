"""The parts of a policy that one layer has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvpolicy.engine.reading import in_host_memory
from kvpolicy.kernels.rotary import Rope
from kvpolicy.mergers.drop import Drop
from kvpolicy.protocols import (
    Codec,
    DecodeMode,
    HeadAllocator,
    Merger,
    MergerTraits,
    Reader,
    ReaderTraits,
    Selector,
    Stage,
    Traits,
)
from kvpolicy.readers.all import ReadAll
from kvpolicy.statistics import (
    GeneratedAttention,
    InputScorer,
    InputScores,
    KeptStatistic,
    ModuleCall,
    Moments,
    Statistic,
    Vectors,
    union,
)
from kvpolicy.statistics.statistic import Projection, first_of

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
        rope: The rotary embedding, if keys are coded unrotated or rebuilt, or the selector needs vectors without it.
        projection: Reads the output projection, if the selector needs the norms of values behind it.
        allocator_statistics: The statistics of a row's first prompt that the allocator needs.
        latent: How many numbers of a key are its value, where none is held; else 0. See `LayerShape`.
        grows: Whether generated tokens are kept in addition to the budget.
        key_rope: The rotary embedding, if keys are coded unrotated.
        statistics: The statistics that the selector needs.
        prompt_statistics: Those that the selector and the merger need.
        step_attention: Whether the selector is given the attention of each generated token.
        step_vectors: Whether it is given the keys and values of each generated token.
        step_moments: Whether it is given the queries of each generated token without their rotation.
        sees_steps: Whether it is shown each generated token, by its attention, its vectors or its scores.
        input_scorer: Scores tokens by the input of the layer; None if the selector does not ask for that.
        needs_call: Whether the selector needs the arguments of the attention module.
        undoes_rotation: Whether the selector must know how keys are rotated.
        stages: The stages of the codec.
        codec_traits: Traits of the codec.
        codec_statistics: The statistics of prompts that the codec keeps.
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
    allocator_statistics: tuple[Statistic[Any], ...] = ()
    latent: int = 0

    grows: bool = field(init=False)
    key_rope: Rope | None = field(init=False)
    statistics: tuple[Statistic[Any], ...] = field(init=False)
    prompt_statistics: tuple[Statistic[Any], ...] = field(init=False)
    step_attention: bool = field(init=False)
    step_vectors: bool = field(init=False)
    step_moments: bool = field(init=False)
    sees_steps: bool = field(init=False)
    input_scorer: InputScorer | None = field(init=False)
    needs_call: bool = field(init=False)
    undoes_rotation: bool = field(init=False)
    stages: tuple[Stage, ...] = field(init=False)
    codec_traits: Traits = field(init=False)
    codec_statistics: tuple[KeptStatistic, ...] = field(init=False)
    merger_traits: MergerTraits = field(init=False)
    reader_traits: ReaderTraits = field(init=False)
    host: bool = field(init=False)
    merges_in_steps: bool = field(init=False)

    def __post_init__(self) -> None:
        """Ask the parts once for what a step needs to know of them."""
        asked = self.selector.statistics
        vectors = first_of(Vectors, asked)
        scores = first_of(InputScores, asked)
        step_attention = first_of(GeneratedAttention, asked) is not None
        step_vectors = vectors is not None and vectors.generated
        facts = {
            "grows": self.decode == "grow",
            "key_rope": self.rope if self.codec.traits.key_space == "unrotated" else None,
            "statistics": asked,
            "prompt_statistics": union(asked, self.merger.statistics),
            "step_attention": step_attention,
            "step_vectors": step_vectors,
            "step_moments": first_of(Moments, asked) is not None,
            "sees_steps": step_attention or step_vectors or scores is not None,
            "input_scorer": None if scores is None else scores.scorer,
            "needs_call": first_of(ModuleCall, asked) is not None,
            "undoes_rotation": any(each.undoes_rotation for each in asked),
            "stages": self.codec.stages,
            "codec_traits": self.codec.traits,
            "codec_statistics": self.codec.statistics,
            "merger_traits": self.merger.traits,
            "reader_traits": self.reader.traits,
            "host": in_host_memory(self.reader, self.layer_idx),
            "merges_in_steps": self.merger.traits.when == "always" and self.decode != "grow",
        }
        for name, fact in facts.items():
            object.__setattr__(self, name, fact)
