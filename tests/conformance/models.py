"""Tiny models of every supported family, random but fixed, and of some that must be refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

VOCABULARY = 48
Config = Callable[[], Any]

_COMMON = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = _COMMON | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def _make(name: str, *without: str, **fields: Any) -> Config:
    def make() -> Any:
        sizes = {key: value for key, value in _SIZES.items() if key not in without}
        config: Any = getattr(transformers, f"{name}Config", None)
        if config is None:
            pytest.skip(f"transformers {transformers.__version__} has no {name}")
        return config(**(sizes | fields))

    return make


def _gemma(name: str, **fields: Any) -> Config:
    layers = ["sliding_attention", "full_attention"] * 3
    more = {"head_dim": 8, "query_pre_attn_scalar": 8} if name != "Gemma4Text" else {"head_dim": 4}
    return _make(
        name, sliding_window=12, num_hidden_layers=6, layer_types=layers, attn_implementation="eager", **more, **fields
    )


def _gemma4() -> Any:
    """Full layers of fewer and larger heads than sliding ones."""
    return _gemma(
        "Gemma4Text",
        num_key_value_heads=4,
        num_global_key_value_heads=2,
        global_head_dim=8,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
    )()


def _shared(name: str, **fields: Any) -> Config:
    """A Gemma whose last layers read the keys of the last ones before them, one with a window and one without."""
    return _make(
        name,
        num_hidden_layers=8,
        layer_types=["sliding_attention", "full_attention"] * 4,
        num_kv_shared_layers=4,
        sliding_window=12,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        attn_implementation="eager",
        **fields,
    )


def _gemma3_pictures() -> Any:
    """A text model inside one of pictures, which makes the masks."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    make: Any = transformers.Gemma3Config
    return make(
        text_config=_gemma("Gemma3Text")(),
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=47,
        boi_token_index=45,
        eoi_token_index=46,
        attn_implementation="eager",
    )


def _falcon(**fields: Any) -> Config:
    more = {"num_kv_heads": 2, "num_ln_in_parallel_attn": None} | fields
    return _make("Falcon", "num_key_value_heads", "intermediate_size", ffn_hidden_size=48, alibi=False, **more)


_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}


def _hybrid(name: str, layers: list[str], *without: str, **fields: Any) -> Config:
    """A family with states in some layers."""
    return _make(name, *without, num_hidden_layers=len(layers), layer_types=layers, **fields)


_FEW_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
_LATENT = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}


def _latent(name: str, **fields: Any) -> Config:
    """A family with latent attention, whose heads are as many for keys as for queries."""
    few = {} if name == "KimiLinear" else {"n_routed_experts": 2, "first_k_dense_replace": 2}
    experts = few | {"moe_intermediate_size": 16, "num_experts_per_tok": 1}
    more = {} if name == "MiniCPM3" else experts
    return _make(name, **{"num_key_value_heads": 4, **_LATENT, **more, **fields})


_GPT = ("num_key_value_heads", "intermediate_size", "hidden_size", "num_hidden_layers", "num_attention_heads")

FAMILIES: dict[str, Config] = {
    "llama": _make("Llama"),
    "mistral": _make("Mistral", sliding_window=None),
    "mixtral": _make("Mixtral", sliding_window=None, num_local_experts=2, num_experts_per_tok=1),
    "qwen2": _make("Qwen2"),
    "qwen3": _make("Qwen3", head_dim=8),
    "phi3": _make("Phi3"),
    "gemma2": _gemma("Gemma2", attn_logit_softcapping=20.0, final_logit_softcapping=30.0),
    "gemma3": _gemma("Gemma3Text"),
    "gpt_neox": _make("GPTNeoX", "num_key_value_heads"),
    "opt": _make(
        "OPT", "num_key_value_heads", "intermediate_size", ffn_dim=48, word_embed_proj_dim=32, do_layer_norm_before=True
    ),
    "falcon_grouped": _falcon(new_decoder_architecture=True),
    "falcon_single": _falcon(new_decoder_architecture=False, multi_query=True, parallel_attn=True),
    "falcon_serial": _falcon(new_decoder_architecture=False, multi_query=False, parallel_attn=False, num_kv_heads=4),
}
"""The families that the issue names."""

UNNAMED: dict[str, Config] = {
    "cohere": _make("Cohere"),
    "olmo2": _make("Olmo2"),
    "stablelm": _make("StableLm"),
    "granite": _make("Granite", residual_multiplier=0.3),
    "starcoder2": _make("Starcoder2", sliding_window=None),
    "glm4": _make("Glm4", head_dim=8),
    "gpt2": _make("GPT2", *_GPT, n_embd=32, n_layer=3, n_head=4, n_positions=512),
    "phi": _make("Phi"),
    "cohere2_hybrid": _gemma("Cohere2"),
    "exaone4": _gemma("Exaone4"),
    "afmoe": _gemma("Afmoe", **_FEW_EXPERTS, num_dense_layers=5),
    "hyperclovax": _make("HyperCLOVAX", use_post_norm=True),
    "jetmoe": _make("JetMoe", "num_attention_heads", kv_channels=8, num_local_experts=2, num_experts_per_tok=1),
    "gpt_oss": _gemma("GptOss", num_local_experts=2, num_experts_per_tok=1),
    "granite_swa": _gemma("GraniteSWA", attention_multiplier=0.35),
    "granitemoe_swa": _gemma("GraniteMoeSWA", num_local_experts=2, num_experts_per_tok=1, attention_multiplier=0.35),
    "flint": _gemma("Flint"),
    "gemma4": _gemma4,
    "gemma3n": _shared("Gemma3nText", head_dim=8, laurel_rank=4, activation_sparsity_pattern=[0.0] * 8),
    "gemma4_shared": _shared("Gemma4Text", head_dim=4, global_head_dim=8, use_double_wide_mlp=True),
    "gemma3_pictures": _gemma3_pictures,
    "qwen3_5": _hybrid(
        "Qwen3_5Text",
        ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        head_dim=8,
        **_LINEAR,
    ),
    "granite_hybrid": _hybrid(
        "GraniteMoeHybrid",
        ["linear_attention", "full_attention", "full_attention"],
        shared_intermediate_size=48,
        num_local_experts=0,
        position_embedding_type="rope",
        mamba_expand=2,
        **_MAMBA,
    ),
    "falcon_h1": _make("FalconH1", head_dim=8, mamba_d_ssm=64, attention_out_multiplier=0.5, **_MAMBA),
    "lfm2": _hybrid("Lfm2", ["conv", "full_attention", "full_attention"], block_auto_adjust_ff_dim=False),
    "deepseek_v3": _latent("DeepseekV3", q_lora_rank=12, n_group=1, topk_group=1),
    "deepseek_v2": _latent("DeepseekV2", q_lora_rank=None, n_group=1, topk_group=1),
    "minicpm3": _latent("MiniCPM3", q_lora_rank=12),
    "kimi_linear": _latent(
        "KimiLinear",
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        q_lora_rank=None,
        mlp_layer_types=["dense"] * 4,
        linear_head_dim=8,
        linear_num_heads=4,
    ),
    "mimo_v2_flash": _make(
        "MiMoV2Flash",
        head_dim=12,
        v_head_dim=8,
        sliding_window=12,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense"] * 3,
        attn_implementation="eager",
    ),
    "nemotron_h": _hybrid(
        "NemotronH",
        ["linear_attention", "mlp", "full_attention", "linear_attention", "full_attention"],
        head_dim=8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=8,
    ),
}
"""Families that nobody named, which must work as well."""

LATENT = ("deepseek_v3", "deepseek_v2", "minicpm3", "kimi_linear")
"""Those with latent attention, where a part of each key is rotated, and the rotation is not undone."""

SHARED = ("gemma3n", "gemma4_shared")
"""Those with layers that read the keys of earlier ones, and have none of their own."""

_PROJECTIONS = ("q_proj", "k_proj", "qkv", "query_key_value", "c_attn")
_SOURCES = {**FAMILIES, **UNNAMED}


@functools.cache
def layers_for(policy: str, family: str = "llama") -> int | None:
    """Two layers, the first and one behind it, where layers have nothing to do with each other; else as many as are.

    Budgets of two layers that are measured can be equal.
    """
    if "squeeze" in policy or "pyramid" in policy or getattr(_SOURCES[family](), "layer_types", None):
        return None
    return 2


@functools.cache
def build(family: str, dtype: torch.dtype = torch.float32, layers: int | None = None) -> Any:
    """A model in evaluation mode; its attention is made sharp, because flat attention hides errors.

    Args:
        family: A name in `FAMILIES` or `UNNAMED`.
        dtype: The dtype of the weights.
        layers: The number of layers where the family's own number is more than a test needs, as when compiling.
    """
    torch.manual_seed(sum(map(ord, family)))
    config = _SOURCES[family]()
    if layers is not None:
        config.num_hidden_layers = layers
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=getattr(config, "_attn_implementation_internal", None) or "sdpa"
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.35 if any(word in name for word in _PROJECTIONS) else 0.15)
        elif name.endswith("sinks"):
            nn.init.normal_(parameter, std=2.0)
        elif name.endswith("k_norm.weight") and getattr(config, "num_kv_shared_layers", 0):
            nn.init.normal_(parameter, mean=1.0, std=0.5)  # else keys, which are normalized last, are all of one norm
    return model.eval().to(dtype)
