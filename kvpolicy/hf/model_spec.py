"""A model's cache as described by its config: its layers, their shapes, and features that are not supported.

A policy may not fit values that have another size than keys, or are a part of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvpolicy.codecs.apart import is_divisible
from kvpolicy.hf.discovery import CROSSES, not_causal
from kvpolicy.hf.division import divided
from kvpolicy.hf.embedded import ShippedConfig
from kvpolicy.hf.layer_sizes import layer_size, widths_of
from kvpolicy.planning.activations import Prefill, Widths
from kvpolicy.planning.memory import ID_NBYTES
from kvpolicy.planning.result import LayerPlan
from kvpolicy.planning.tuned import resolve
from kvpolicy.policy import LayeredPolicy, Policy, for_model
from kvpolicy.protocols import Candidates, LayerShape, Merger, ModelInfo
from kvpolicy.statistics import RecentQueries, ReplayedRows
from kvpolicy.statistics.statistic import first_of
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.tables import sum_by_kind


class LayerStates(NamedTuple):
    """The states of a layer: of linear attention, a state space model or a convolution.

    Attributes:
        number: How many there are of each kind.
        nbytes: Bytes of one row.
    """

    number: int
    nbytes: int


class _Kinds(NamedTuple):
    """The layers of a model by what they hold.

    Attributes:
        attending: Layers with a cache of all tokens.
        windows: Sliding windows.
        states: Numbers of states.
        depth: All layers.
        owners: Layers whose keys others read.
    """

    attending: list[int]
    windows: dict[int, int]
    states: dict[int, int]
    depth: int
    owners: dict[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model's cache, as described by its config.

    Attributes:
        shape: Shape of the keys of a layer on one rank.
        whole: The same on all ranks together.
        evictable: Layers that a policy manages.
        unmanaged: Unmanaged layers, which bound their own cache, and their sliding windows.
        unmanaged_shapes: Shapes of the keys of each unmanaged layer.
        widths: Widths of the tensors of a forward on one rank.
        states: States of layers that have some, beside their attention or in place of it; the model's own.
        depth: All layers of the model: also those with neither tokens nor a state, such as an MLP alone.
        owners: For each layer that reads the keys of an earlier one, and holds nothing, the index of that layer.
        given: Bytes of a token as the decoder is given it: an id, or an embedding with what layers are given beside it.
    """

    shape: LayerShape
    whole: LayerShape
    evictable: list[int]
    unmanaged: dict[int, int]
    unmanaged_shapes: dict[int, LayerShape]
    widths: Widths
    states: dict[int, LayerStates]
    depth: int
    owners: dict[int, int]
    given: int

    def info(self, weights: torch.Tensor | None = None) -> ModelInfo:
        """Description of the model for codecs.

        Args:
            weights: The weight fingerprint of the model, if it is loaded.
        """
        sizes = len(self.evictable), self.heads, self.shape.head_dim
        return ModelInfo(*sizes, weights, tuple(self.evictable), self.depth, self.widths.hidden)

    @property
    def heads(self) -> int:
        """KV heads of a layer on all ranks."""
        return self.whole.heads

    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token in one layer."""
        return self.shape.token_nbytes

    def unmanaged_bytes(self, batch: int, columns: int) -> dict[int, int]:
        """Bytes of windows and states after `columns` tokens, by layer; transformers keeps one less than the window."""
        tokens = {index: batch * min(columns, window - 1) for index, window in self.unmanaged.items()}
        windows = {index: count * self.unmanaged_shapes[index].token_nbytes for index, count in tokens.items()}
        return sum_by_kind([windows, self.state_bytes(batch)])

    def state_bytes(self, batch: int) -> dict[int, int]:
        """Bytes of the states of each layer that has some, which do not depend on the tokens seen."""
        return {index: batch * states.nbytes for index, states in self.states.items()}

    def unmanaged_prefill_bytes(self, batch: int, columns: int, chunk: int) -> int:
        """Bytes of all windows and states while a prompt is prefilled.

        A layer of transformers holds the last chunk until the next token comes, and the window before it.

        Args:
            batch: Rows.
            columns: Tokens of the prompt.
            chunk: Tokens that are prefilled at a time.
        """
        tokens = {index: batch * min(columns, window - 1 + chunk) for index, window in self.unmanaged.items()}
        windows = sum(count * self.unmanaged_shapes[index].token_nbytes for index, count in tokens.items())
        return windows + sum(self.state_bytes(batch).values())

    def prefill(
        self,
        policy: Policy,
        layers: Sequence[LayerPlan],
        columns: int,
        chunk: int | None = None,
        tile: int | None = None,
        *,
        holds: bool = False,
    ) -> Prefill:
        """The sizes that determine the activations of a prefill.

        Args:
            policy: The policy.
            layers: The plan of each layer under it.
            columns: Tokens of the longest prompt.
            chunk: Tokens that are prefilled at a time; None for all.
            tile: Tokens that a layer takes at a time; None for all.
            holds: Whether chunks are held until the last one.
        """
        return self._prefill(
            policy,
            columns=columns,
            chunk=min(chunk or columns, columns),
            slots=max(layer.layout.slots for layer in layers),
            coded=max(sum(layer.layout.coded) for layer in layers),
            tile=tile,
            holds=holds,
        )

    def prompt_prefill(self, policy: Policy, columns: int, tile: int | None) -> Prefill:
        """The prefill of a prompt in one piece of which a layer may keep, and encode, everything.

        Args:
            policy: The policy.
            columns: Tokens of the prompt.
            tile: Tokens that a layer takes at a time; None for all.
        """
        coded = columns if any(own.codec.stages for own in policy.distinct) else 0
        return self._prefill(policy, columns=columns, chunk=columns, slots=columns, coded=coded, tile=tile)

    def _prefill(self, policy: Policy, **sizes: Any) -> Prefill:
        windows = {(window, self.unmanaged_shapes[index]) for index, window in self.unmanaged.items()}
        return Prefill(policy=policy, shape=self.shape, widths=self.widths, windows=tuple(windows), **sizes)


def describe(config: Any, dtype: torch.dtype | None = None, tp: int = 1, *, follows_plan: bool = False) -> ModelShape:
    """Describe a model's cache from its config.

    Args:
        config: A transformers config.
        dtype: Dtype of keys and values; the config's own by default.
        tp: The tensor parallel size.
        follows_plan: Whether transformers shards the model by the plan of its config, and not DeepSpeed.

    Raises:
        KVPolicyError: If a policy does not support the model.
    """
    text = config.get_text_config(decoder=True)
    check_supported(config)
    # A vision tower or other parts have configs of their own; only the text decoder has the cache.
    kinds = _sort_layers(text)
    evictable = kinds.attending
    windows = kinds.windows
    if tp > 1 and not follows_plan:
        _check_sharded(text, kinds, tp)
    # Of a model of several parts, the whole config has the dtype.
    named = dtype or getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.get_default_dtype()
    wanted = getattr(torch, named, None) if isinstance(named, str) else named
    if not isinstance(wanted, torch.dtype):
        raise KVPolicyTypeError(f"dtype must be a torch.dtype, got {named!r}; try torch.bfloat16.")
    if not wanted.is_floating_point:
        raise KVPolicyError(f"dtype must be one of floating-point numbers, got {wanted}; try torch.bfloat16.")
    layers = _layer_configs(text)
    sizes = [layer_size(layer, windows.get(index)) for index, layer in enumerate(layers)]
    kept = {sizes[index] for index in evictable}
    if len(kept) > 1:
        raise KVPolicyError(
            "All layers with full attention must have the same number of KV heads and the same head dimension, since "
            f"they share a budget, got {sorted(size[:2] for size in kept)} for {text.model_type}."
        )
    ranks = 1 if follows_plan and divided(config) == "nothing" else tp
    shapes = [size.on(wanted, ranks) for size in sizes]
    first = evictable[0]
    return ModelShape(
        shape=shapes[first],
        whole=sizes[first].on(wanted, 1),
        evictable=evictable,
        unmanaged=windows,
        unmanaged_shapes={index: shapes[index] for index in windows},
        widths=widths_of(layers, tp, ranks),
        states=_states(text, kinds.states, wanted),
        depth=kinds.depth,
        owners=kinds.owners,
        given=ID_NBYTES if text is config else _embedded_nbytes(text, wanted),
    )


def _embedded_nbytes(text: Any, dtype: torch.dtype) -> int:
    """Bytes of a token that a model of several parts embeds, with the embeddings by layer of some (Gemma 4)."""
    by_layer = getattr(text, "hidden_size_per_layer_input", None) or 0
    return (text.hidden_size + by_layer * text.num_hidden_layers) * dtype.itemsize


def _check_sharded(text: Any, kinds: _Kinds, tp: int) -> None:
    """Refuse layers that DeepSpeed does not shard."""
    if kinds.owners:
        raise KVPolicyError(
            f"Every layer must have keys of its own on several ranks, got {text.model_type} with {len(kinds.owners)} "
            f'layers that read those of others and tp={tp}; try backend="hf".'
        )
    if kinds.states:
        raise KVPolicyError(
            f"Every layer must have attention alone on several ranks, got {text.model_type} with states in "
            f'{len(kinds.states)} layers and tp={tp}; try backend="hf".'
        )


def _states(text: Any, counts: dict[int, int], dtype: torch.dtype) -> dict[int, LayerStates]:
    """The states of each layer that has some; every rank holds them whole."""
    if not counts:
        return {}
    from kvpolicy.hf.states import state_nbytes

    nbytes = state_nbytes(text, dtype)
    return {index: LayerStates(count, nbytes[index]) for index, count in counts.items() if index in nbytes}


def check_supported(config: Any) -> None:
    """Raise KVPolicyError if a policy does not support the model of a config, as far as its fields say."""
    if isinstance(config, ShippedConfig):
        return
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False) or _has_encoder(text.model_type):
        raise KVPolicyError("The model must be a decoder-only causal language model, got an encoder-decoder model.")
    if getattr(text, "num_hidden_layers", None) is None:
        raise KVPolicyError(
            f"The config must have num_hidden_layers, the layers of the cache, got none for {text.model_type}; try a "
            "decoder-only causal language model."
        )
    if text.model_type == "falcon" and text.alibi:
        raise KVPolicyError("A Falcon must use rotary embeddings, got one with ALiBi, which is not supported.")
    if getattr(text, "cross_attention_layers", None) or getattr(text, "add_cross_attention", False):
        raise not_causal(text.model_type, CROSSES)
    if text.model_type == "jetmoe" and text.num_experts_per_tok > 1:
        raise KVPolicyError(
            f"A JetMoE must have one expert per token, got {text.num_experts_per_tok}: it repeats its KV heads for "
            "each of them, and a policy would store every copy."
        )
    # GPT-NeoX and others are causal with is_decoder=False, so it counts only for models that predict masked tokens.
    if getattr(text, "is_decoder", None) is False and _fills_masks(text.model_type):
        raise KVPolicyError(
            f"The model must be a decoder-only causal language model, got {text.model_type}, which is not causal."
        )
    if text.num_hidden_layers < 1:
        raise KVPolicyError(
            f"The config must have at least one layer, got {text.num_hidden_layers} for {text.model_type}."
        )


def resolve_for(policy: Policy, shape: ModelShape, info: ModelInfo) -> Policy:
    """Resolve a policy for a model: load one that is made from a file, leave out unmanaged layers, give others codecs.

    Raises:
        KVPolicyError: If the file cannot be read, is of another model, or has no policy for the budget.
    """

    def unmanaged_nbytes(columns: int) -> int:
        return sum(shape.unmanaged_bytes(1, columns).values())

    found = resolve(policy, info, shape.shape, shape.whole, unmanaged_nbytes)
    if isinstance(found, LayeredPolicy) and len(found.layers) == info.depth:
        resolved = found.of_layers(shape.evictable)
    else:
        resolved = for_model(found, info)
    check_values(resolved, shape.shape)
    return resolved


def _layer_configs(text: Any) -> list[Any]:
    """The config of each layer, which is the common one unless layers differ."""
    if getattr(text, "is_heterogeneous", False):
        return list(text.per_layer_config)
    return [text] * text.num_hidden_layers


def _has_encoder(model_type: str) -> bool:
    """Whether a model has an encoder, also if its decoder is used alone."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES


def _fills_masks(model_type: str) -> bool:
    """Whether a model predicts masked tokens; `is_decoder=False` alone also occurs in causal models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _sort_layers(text: Any) -> _Kinds:
    """Sort the layers of a config by what they hold."""
    if isinstance(text, ShippedConfig):  # of attention layers alone
        windows = text.windows()
        attending = [index for index in range(text.num_hidden_layers) if index not in windows]
        return _Kinds(attending, windows, {}, text.num_hidden_layers, {})
    from transformers import cache_utils

    from kvpolicy.hf.cache_names import DummyLayer
    from kvpolicy.hf.shared_keys import key_owners

    # Which layers transformers' own cache has for the config says what each of them holds.
    found = _Kinds([], {}, {}, text.num_hidden_layers, key_owners(text))
    for index, layer in enumerate(stock_layers(text)):
        kind = type(layer)
        if index in found.owners:
            continue
        if kind in (cache_utils.DynamicLayer, cache_utils.LinearAttentionAndFullAttentionLayer):
            found.attending.append(index)
        if kind in (
            cache_utils.DynamicSlidingWindowLayer,
            cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
        ):
            found.windows[index] = int(layer.sliding_window)
        if kind in (
            cache_utils.LinearAttentionLayer,
            cache_utils.LinearAttentionAndFullAttentionLayer,
            cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
        ):
            found.states[index] = layer.number_of_states
        if kind is not DummyLayer and index not in {*found.attending, *found.windows, *found.states}:
            raise KVPolicyError(
                f"Every layer must have full or sliding-window attention, a state, or both, got layer {index} of "
                f"{text.model_type}, whose cache ({kind.__name__}) {_also_holds(kind.__name__)}; try another model."
            )
    if not found.attending:
        raise KVPolicyError(
            f"At least one layer must have full attention, got {_count_kinds(found)} for {text.model_type}; try "
            "config.sliding_window = None if the model supports it."
        )
    return found


def _also_holds(kind: str) -> str:
    """Say what a layer of transformers' caches holds besides keys and values, by the name of its class.

    >>> _also_holds("DynamicIndexedLayer")
    'also holds an index, by which sparse attention chooses tokens'
    """
    for word, holds in _HOLDS.items():
        if word in kind:
            return holds
    return "holds more than the keys and values of tokens"


_HOLDS = {
    "Indexed": "also holds an index, by which sparse attention chooses tokens",
    "Sparse": "also holds an index, by which sparse attention chooses tokens",
    "HCA": "holds entries that stand for several tokens (compressed attention)",
    "CSA": "holds entries that stand for several tokens (compressed attention)",
    "Reference": "holds a window and a reference text before it",
}
"""By a word in the names of such classes."""


def _count_kinds(found: _Kinds) -> str:
    """How many layers without full attention there are of each kind."""
    states = len(found.states.keys() - found.windows.keys())
    parts = [(len(found.windows), "sliding-window layers"), (states, "layers with a state alone")]
    return " and ".join(f"{number} {kind}" for number, kind in parts if number) or "none"


def stock_layers(text: Any) -> list[Any]:
    """The layers of the stock cache of a text decoder's config: transformers decides the kind of each.

    Its cache is empty if all layers are of the default kind.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    return list(DynamicCache(config=text).layers) or [DynamicLayer() for _ in range(text.num_hidden_layers)]


def check_values(policy: Policy, shape: LayerShape) -> None:
    """Refuse a policy with a part that takes values for as large as keys, or for vectors of their own.

    Args:
        policy: The policy.
        shape: The shape of the layers under it.

    Raises:
        KVPolicyError: Naming the part.
    """
    if shape.value_dim is None:
        return
    for own in policy.distinct:
        if not is_divisible(own.codec):
            raise KVPolicyError(
                f"The codec must encode keys and values separately for {_described(shape)}, got {own.codec}; try "
                "tokenwise, kivi, turboquant or bfp."
            )
        if not shape.latent and own.heads is not None and own.codec.stages:
            raise KVPolicyError(
                f"The codec must be plain with budgets of heads for {_described(shape)}, since a page has codes of one "
                f"size, got {own}; try the policy without its codec, or without budgets of heads."
            )
        if not shape.latent and own.reader.traits.estimates_rest:
            raise KVPolicyError(
                f"The reader must need no summaries of values for {_described(shape)}, got {own.reader}; try quest."
            )
    if shape.latent and not changes_keys(policy.merger):
        raise KVPolicyError(
            f"The merger must merge keys for {_described(shape)}, whose values are a part of them, got "
            f"{policy.merger}; try d2o, elastic or compensate."
        )
    if shape.latent and policy.heads is not None:
        raise KVPolicyError(
            f"Heads must have no budgets of their own for {_described(shape)}, which all query heads share, got "
            f"{policy}; try the policy without them."
        )
    if shape.latent and policy.undoes_rotation:
        raise KVPolicyError(
            f"The rotary embedding of keys must not be undone for {_described(shape)}, got the "
            f"{policy.undoes_rotation} of {policy}; try another one."
        )


def changes_keys(merger: Merger) -> bool:
    """Whether a merger changes keys, as a prompt of three tokens shows, of which two are kept; so does one that drops.

    >>> from kvpolicy import D2O, Blend
    >>> changes_keys(D2O()), changes_keys(Blend())
    (True, False)
    """
    if merger.traits.when == "never":
        return True
    tokens = torch.ones(1, 1, 3, 2, device="cpu", dtype=torch.float32)
    weights = torch.full((1, 1, 1, 3), 1 / 3, device="cpu", dtype=torch.float32)
    every = torch.zeros(1, 1, 3, device="cpu", dtype=torch.float32)
    kept = torch.tensor([[[True, True, False]]], device="cpu")
    found = merger.merge_prompt(
        merger.alloc(1, 1, "cpu"),
        Candidates(
            keys=tokens,
            values=tokens,
            positions=torch.arange(3, dtype=torch.int32, device="cpu")[None, None],
            kept=kept,
            targets=torch.tensor([[[0, 1]]], device="cpu"),
            is_target=kept[..., :2],
            counts=every if merger.traits.counted else None,
            attention=weights if first_of(RecentQueries, merger.statistics) else None,
            length=torch.tensor([3], device="cpu"),
            priority=every if merger.traits.ranked else None,
            replay_attention=weights if first_of(ReplayedRows, merger.statistics) else None,
        ),
    )
    return found.keys is not None


def _described(shape: LayerShape) -> str:
    if shape.latent:
        return "latent attention (MLA)"
    return f"values of {shape.value_dim} and keys of {shape.head_dim} channels"
