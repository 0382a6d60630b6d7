"""Sizes of a model's tensors, from its config: the keys and values that a layer caches, and widths of activations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from kvpolicy.planning.activations import Widths
from kvpolicy.protocols import LayerShape


class LayerSize(NamedTuple):
    """Sizes of the keys and values of a layer, on all ranks together.

    Attributes:
        heads: KV heads.
        head_dim: Size of a key.
        value_dim: Size of a value that is held; 0 if a value is a part of its key.
        latent: How many numbers of a key are its value then; else 0.
        queries: Query heads.
    """

    heads: int
    head_dim: int
    value_dim: int
    latent: int
    queries: int

    def on(self, dtype: torch.dtype, ranks: int) -> LayerShape:
        """The shape of the layer on one of `ranks` ranks.

        The query heads of a KV head are divided if ranks outnumber KV heads.
        """
        group = max(self.queries // self.heads // max(ranks // self.heads, 1), 1)
        value_dim = None if self.value_dim == self.head_dim else self.value_dim
        heads = -(-self.heads // ranks)
        return LayerShape(heads, self.head_dim, dtype, group, self.heads, value_dim, self.latent)


def layer_size(text: Any, window: int | None) -> LayerSize:
    """The sizes of a layer.

    Args:
        text: The config of the layer.
        window: Its sliding window; None if it attends to all tokens.
    """
    queries: int = text.num_attention_heads
    latent: int = getattr(text, "kv_lora_rank", None) or 0
    if latent:
        return LayerSize(1, latent + text.qk_rope_head_dim, 0, latent, queries)
    heads = getattr(text, "num_key_value_heads", None) or queries
    if text.model_type == "falcon":  # its older architecture ignores num_kv_heads
        heads = text.num_kv_heads
        if not text.new_decoder_architecture:
            heads = 1 if text.multi_query else queries
    if text.model_type == "mimo_v2_flash" and window is not None:  # by its attention module, not by its config
        heads *= 2
    dim = getattr(text, "head_dim", None) or text.hidden_size // queries
    return LayerSize(heads, dim, getattr(text, "v_head_dim", None) or dim, 0, queries)


SEPARATE = frozenset(
    {
        "cohere",
        "cohere2",
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "llama",
        "mistral",
        "olmo",
        "olmo2",
        "qwen2",
        "qwen3",
        "smollm3",
        "stablelm",
    }
)
"""Families with gate and up of the MLP as two matrices: the activated gate, up and their product are alive at once."""

EAGER = frozenset({"flint", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "vaultgemma"})
"""Families for which transformers computes sliding-window layers with a whole matrix of attention weights."""


def widths_of(layers: Iterable[Any], tp: int = 1, heads: int | None = None) -> Widths:
    """Read the widths of a model from the configs of its layers; those of the widest count.

    Args:
        layers: The config of each layer, which may be the same one.
        tp: The tensor parallel size; of several ranks, the widths are those of the one that holds the most.
        heads: The number of ranks over which heads are divided, if it is another one.
    """
    each = [
        _of_layer(layer, tp, tp if heads is None else heads)
        for layer in {id(layer): layer for layer in layers}.values()
    ]
    return Widths(*map(max, zip(*each, strict=True)))


def _of_layer(text: Any, tp: int, ranks: int) -> Widths:
    heads = -(-text.num_attention_heads // ranks)
    size = layer_size(text, None)
    return Widths(
        hidden=text.hidden_size,
        mlp=max(_dense(text, tp), _experts(text, tp)),
        queries=heads * size.head_dim,
        vocab=getattr(text, "vocab_size", 0),
        tiled=bool(getattr(text, "attn_logit_softcapping", None)) or text.model_type == "gpt_oss",
        eager=text.model_type in EAGER,
        expanded=heads * _expanded(text) if size.latent else 0,
    )


def _expanded(text: Any) -> int:
    """Elements of a head: its query, what a latent vector is expanded to, and its key behind the expansion."""
    return 2 * (text.qk_nope_head_dim + text.qk_rope_head_dim) + text.qk_nope_head_dim + text.v_head_dim


def _intermediate(text: Any) -> int:
    """The width of an MLP, under the names that it has; some families have a list, one for each layer."""
    names = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
    found = (_number(text, name) for name in names)
    return next((value for value in found if value), 4 * text.hidden_size)


def _number(text: Any, name: str) -> int:
    """A number of a config, the largest where it has one for each layer or modality; 0 if it has none."""
    value: Any = getattr(text, name, None)
    if isinstance(value, list | tuple):
        value = max((one for one in value if isinstance(one, int)), default=0)
    return value if isinstance(value, int) else 0


def _dense(text: Any, tp: int) -> int:
    """Elements of a dense MLP; 0 if every layer has experts."""
    every = getattr(text, "decoder_sparse_step", 1) == 1 and not getattr(text, "mlp_only_layers", None)
    if _per_token(text) and every and not getattr(text, "first_k_dense_replace", 0):
        return 0
    # A fused matrix of gate and up stays alive beside the activated gate and the product.
    return (3 if text.model_type in SEPARATE else 4) * -(-_intermediate(text) // tp)


def _experts(text: Any, tp: int) -> int:
    """Elements of the experts of a layer; 0 without experts."""
    number = _per_token(text)
    if not number:
        return 0
    hidden = text.hidden_size
    width = -(-(_number(text, "moe_intermediate_size") or _intermediate(text)) // tp)
    shared = 3 * -(-_number(text, "shared_expert_intermediate_size") // tp)
    # Each token is copied for each of its experts. gpt-oss adds biases, clamps gate and up, and multiplies in steps.
    inner = hidden + (9 if text.model_type == "gpt_oss" else 4) * width
    return number * max(inner, 4 * hidden) + shared


def _per_token(text: Any) -> int:
    """Experts of each token; 0 without experts."""
    if not any(_number(text, name) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
        return 0
    return _number(text, "num_experts_per_tok")
