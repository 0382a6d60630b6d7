"""The widths of a model's tensors, from which plans compute activations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvpolicy.hf.layer_sizes import layer_size
from kvpolicy.planning.activations import Widths

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


def widths_of(layers: Iterable[Any], tp: int = 1) -> Widths:
    """Read the widths of a model from the configs of its layers; those of the widest count.

    Args:
        layers: The config of each layer, which may be the same one.
        tp: The tensor parallel size; of several ranks, the widths are those of the one that holds the most.
    """
    each = [_of_layer(layer, tp) for layer in {id(layer): layer for layer in layers}.values()]
    return Widths(*map(max, zip(*each, strict=True)))


def _of_layer(text: Any, tp: int) -> Widths:
    heads = -(-text.num_attention_heads // tp)
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
