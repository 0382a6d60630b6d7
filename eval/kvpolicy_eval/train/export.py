"""Export a training net as a transformers model that `AutoModelForCausalLM.from_pretrained` loads offline."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvpolicy_eval.train.net import Net
from kvpolicy_eval.train.tokenizer import token_id

MAX_POSITIONS = 2048
"""Trained up to 1,024; the rest lets generation continue after a full prompt."""
LONG_POSITIONS = 4096 + 640
"""All of them trained: 4,096 of a prompt, and as many as a replay of its chunks takes."""

_LAYER_WEIGHTS = {
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.o_proj": "output",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}
"""Name in a layer of transformers' Llama to the name of the stacked weights in `Net`."""


def to_llama(net: Net, tokenizer: PreTrainedTokenizerFast, positions: int = MAX_POSITIONS) -> LlamaForCausalLM:
    """Copy `net` into a fp32 LlamaForCausalLM with tied embeddings and `positions` positions."""
    s = net.shape
    config = LlamaConfig(
        vocab_size=s.vocab_size,
        hidden_size=s.hidden_size,
        intermediate_size=s.intermediate_size,
        num_hidden_layers=s.num_layers,
        num_attention_heads=s.num_heads,
        num_key_value_heads=s.num_kv_heads,
        head_dim=s.head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=s.eps,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": s.rope_theta},
        bos_token_id=token_id(tokenizer, "<s>"),
        eos_token_id=token_id(tokenizer, "</s>"),
        pad_token_id=token_id(tokenizer, "<pad>"),
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(_llama_weights(net))
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model.eval()


def _llama_weights(net: Net) -> dict[str, torch.Tensor]:
    weights = {
        f"model.layers.{layer}.{name}.weight": getattr(net, stack)[layer].detach()
        for name, stack in _LAYER_WEIGHTS.items()
        for layer in range(net.shape.num_layers)
    }
    embedding = net.embedding.detach()
    return weights | {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding,
        "model.norm.weight": net.final_norm.detach(),
    }


def load_llama(net: Net, folder: Path) -> None:
    """Copy the weights of an exported model into `net`, which must have its shape."""
    weights = load_file(folder / "model.safetensors")
    with torch.no_grad():
        net.embedding.copy_(weights["model.embed_tokens.weight"])
        net.final_norm.copy_(weights["model.norm.weight"])
        for name, stack in _LAYER_WEIGHTS.items():
            for layer in range(net.shape.num_layers):
                getattr(net, stack)[layer].copy_(weights[f"model.layers.{layer}.{name}.weight"])


def export(
    net: Net,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    positions: int = MAX_POSITIONS,
) -> None:
    """Save model, configurations and tokenizer files to `folder`."""
    model = to_llama(net, tokenizer, positions)
    model.to(dtype=dtype)  # pyright: ignore[reportCallIssue]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # transformers 5 writes a class name that version 4 does not know; both know this one.
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("is_local", "local_files_only"):  # how a tokenizer was loaded that is exported again
        settings.pop(name, None)
    path.write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only
