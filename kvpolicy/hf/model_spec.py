"""What a model is: which layers can be evicted, where their attention is, and what cannot be supported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvpolicy.hf.discovery import attention_classes, check_attention_class, no_single_stack, not_causal
from kvpolicy.protocols import LayerShape, ModelInfo
from kvpolicy.spec.errors import KVPolicyError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model's cache as its config tells it.

    Attributes:
        shape: Of one layer's keys, on one rank.
        heads: KV heads of a layer, on all ranks.
        evictable: Layers that a policy can keep small.
        left_alone: Layers that bound their cache themselves, with their window.
        alone_shapes: Of the keys of each of these.
    """

    shape: LayerShape
    heads: int
    evictable: list[int]
    left_alone: dict[int, int]
    alone_shapes: dict[int, LayerShape]

    def info(self, weights: torch.Tensor | None = None) -> ModelInfo:
        """What a codec may know of the model."""
        return ModelInfo(len(self.evictable), self.heads, self.shape.head_dim, weights, tuple(self.evictable))

    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return self.shape.token_nbytes

    def alone_bytes(self, batch: int, columns: int) -> dict[int, int]:
        """Bytes of each layer that is left alone, after `columns` tokens: transformers keeps its window less one."""
        tokens = {index: batch * min(columns, window - 1) for index, window in self.left_alone.items()}
        return {index: count * self.alone_shapes[index].token_nbytes for index, count in tokens.items()}


def describe(config: Any, dtype: torch.dtype | None = None, tp: int = 1) -> ModelShape:
    """Read a config.

    Raises:
        KVPolicyError: Where the model's cache is of a kind that a policy cannot evict from.
    """
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False) or _has_encoder(text.model_type):
        raise KVPolicyError("Encoder-decoder models are not supported: use a decoder-only causal language model.")
    if getattr(text, "kv_lora_rank", None):
        raise KVPolicyError(
            f"{text.model_type} stores latent vectors instead of keys and values (MLA), which no policy can rank: "
            "use a model with ordinary or grouped-query attention."
        )
    if text.model_type == "falcon" and text.alibi:
        raise KVPolicyError("falcon adds ALiBi to its scores, which is not supported: use a rotary Falcon.")
    if getattr(text, "cross_attention_layers", None) or getattr(text, "add_cross_attention", False):
        raise not_causal(text.model_type)
    if text.model_type == "jetmoe" and text.num_experts_per_tok > 1:
        raise KVPolicyError(
            f"This jetmoe repeats its KV heads for {text.num_experts_per_tok} experts before it attends, and a policy "
            "would store every copy: use a model with ordinary or grouped-query attention."
        )
    if getattr(text, "is_decoder", None) is False and _fills_masks(text.model_type):
        raise KVPolicyError(
            f"{text.model_type} looks ahead and keeps no cache: use a decoder-only causal language model."
        )
    if text.num_hidden_layers < 1:
        raise KVPolicyError(
            f"This {text.model_type} has {text.num_hidden_layers} layers and nothing to cache: check its config."
        )
    evictable, alone = _sort_layers(text)
    wanted = dtype or getattr(text, "dtype", None) or torch.get_default_dtype()
    if isinstance(wanted, str):
        wanted = getattr(torch, wanted)
    sizes = {index: _size(layer) for index, layer in enumerate(_layer_configs(text))}
    kept = {sizes[index] for index in evictable}
    values: int | None = getattr(text, "v_head_dim", None)
    if values is not None and any(dim != values for _, dim in kept):
        raise KVPolicyError(
            f"The heads of this {text.model_type} have values of {values} numbers and keys of another size, which a "
            "policy's slots cannot hold: use a model whose keys and values are alike."
        )
    if len(kept) > 1:
        raise KVPolicyError(
            f"The full layers of this {text.model_type} differ in KV heads or head sizes, {sorted(kept)}, which a "
            "policy cannot share a budget among: use a model whose full layers are alike."
        )
    shapes = {index: LayerShape(-(-heads // tp), dim, wanted) for index, (heads, dim) in sizes.items()}
    return ModelShape(
        shape=shapes[evictable[0]], heads=sizes[evictable[0]][0], evictable=evictable, left_alone=alone,
        alone_shapes={index: shapes[index] for index in alone},
    )  # fmt: skip


def check_class(config: Any) -> None:
    """Say from a config what attaching would say of the attention of its model's class, without building it.

    Raises:
        KVPolicyError: Where the class is one of transformers' own and cannot be attached to.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config(decoder=True)
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None))
    if not isinstance(model, type) or not model.__module__.startswith("transformers.") or text.model_type == "falcon":
        return
    kinds = attention_classes(model.__module__)
    if not kinds:
        raise no_single_stack(model.__name__)
    for kind in kinds:
        check_attention_class(text.model_type, kind)


def _layer_configs(text: Any) -> list[Any]:
    """Each layer's own config, where layers differ; else the common one again and again."""
    if getattr(text, "is_heterogeneous", False):
        return list(text.per_layer_config)
    return [text] * text.num_hidden_layers


def _size(text: Any) -> tuple[int, int]:
    """KV heads and head dimension."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if text.model_type == "falcon":
        heads = text.num_kv_heads
        if not text.new_decoder_architecture:
            heads = 1 if text.multi_query else text.num_attention_heads
    return heads, getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _has_encoder(model_type: str) -> bool:
    """Whether a model's decoder looks at an encoder, also where it is taken alone."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES


def _fills_masks(model_type: str) -> bool:
    """Whether a model is known for predicting masked tokens; some causal ones have `is_decoder=False` too."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _sort_layers(text: Any) -> tuple[list[int], dict[int, int]]:
    evictable: list[int] = []
    alone: dict[int, int] = {}
    stock = DynamicCache(config=text).layers or [DynamicLayer() for _ in range(text.num_hidden_layers)]
    for index, layer in enumerate(stock):
        if type(layer) is DynamicLayer:
            evictable.append(index)
        elif isinstance(layer, DynamicSlidingWindowLayer):
            alone[index] = int(layer.sliding_window)
        else:
            raise KVPolicyError(
                f"Layer {index} of {text.model_type} caches {type(layer).__name__}, which a policy cannot evict from: "
                "use a model whose layers are full or sliding-window attention."
            )
    if not evictable:
        raise KVPolicyError(
            f"Every layer of this {text.model_type} (0 to {len(stock) - 1}) is a sliding window, which bounds its own "
            "cache: there is nothing to evict; set config.sliding_window = None where the model allows it."
        )
    return evictable, alone
