"""Tiny models of several families, with weights drawn from a fixed generator."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

VOCABULARY = 48

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 12,
    "head_dim": 8,
    "attn_implementation": "eager",
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),  # grouped-query attention
    "llama_mqa": ("Llama", {"num_key_value_heads": 1}),  # one KV head, which both ranks hold
    "qwen3": ("Qwen3", {"head_dim": 8}),  # normalized queries and keys
    "gemma2": (  # capped scores, sliding layers between full ones
        "Gemma2",
        _HYBRID | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0},
    ),
    "gpt_oss": ("GptOss", _HYBRID | _EXPERTS),  # attention sinks, experts
    "gpt_neox": ("GPTNeoX", {"num_key_value_heads": None, "rotary_pct": 0.5}),  # partial rotary, one projection
    "phi": ("Phi", {"num_key_value_heads": 4}),  # partial rotary, biases
    "falcon": (  # one KV head, attention of its own
        "Falcon",
        {
            "num_key_value_heads": None,
            "intermediate_size": None,
            "ffn_hidden_size": 48,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            "alibi": False,
        },
    ),
    "gpt2": (  # learned positions
        "GPT2",
        {
            **dict.fromkeys(("num_key_value_heads", "intermediate_size", "hidden_size"), None),
            **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "max_position_embeddings"), None),
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 2048,
        },
    ),
    "qwen3_5": (  # states of linear attention between attending layers
        "Qwen3_5Text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "falcon_h1": (  # a state beside the slots of each layer
        "FalconH1",
        {
            "head_dim": 8,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 8,
        },
    ),
    "deepseek_v3": (  # latent vectors
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 12,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "moe_intermediate_size": 16,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "first_k_dense_replace": 2,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "gemma3n": (  # layers that read the keys of earlier ones
        "Gemma3nText",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "sliding_window": 12,
            "head_dim": 8,
            "num_kv_shared_layers": 2,
            "intermediate_size": [48] * 6,
            "activation_sparsity_pattern": [0.0] * 6,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "laurel_rank": 4,
        },
    ),
}
"""By name: the class of the config, and its fields where they differ from the common ones; None omits a field."""

KINDS = ["qwen3_5", "falcon_h1", "deepseek_v3", "gemma3n"]
"""Families of which a layer holds something else than keys and values of its own."""

MAIN = [name for name in FAMILIES if name not in ("llama_mqa", *KINDS)]
"""The families that every policy meets."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_PROJECTIONS = ("q_proj", "k_proj", "qkv", "query_key_value", "c_attn")


@functools.cache
def build(family: str, dtype: str = "fp32") -> Any:
    """A model in evaluation mode. Its attention is sharp, since flat attention hides differences."""
    kind, fields = FAMILIES[family]
    given = {name: value for name, value in {**_SIZES, **fields}.items() if value is not None}
    config = getattr(transformers, f"{kind}Config")(**given)
    how = given.get("attn_implementation", "sdpa")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=how)
    generator = torch.Generator().manual_seed(sum(map(ord, family)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(std=2.0, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1, generator=generator)
            elif parameter.dim() >= 2:
                sharp = any(word in name for word in _PROJECTIONS)
                parameter.normal_(std=0.35 if sharp else 0.15, generator=generator)
    return model.eval().to(DTYPES[dtype])
