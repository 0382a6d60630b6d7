"""The random Llama whose speed is measured."""

from __future__ import annotations

from pathlib import Path

from kvpolicy_eval.peers.pair import Options


def save_random_llama(path: str | Path, options: Options, queries_per_head: int) -> None:
    """Save a Llama with random weights, the same in every call, in a folder that both sides can load.

    Args:
        path: The folder.
        options: With its layers and its hidden size; heads have 64 channels.
        queries_per_head: Query heads that share a KV head.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = options.hidden // 64
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // queries_per_head, 1),
        vocab_size=1024,
        head_dim=64,
        max_position_embeddings=32768,
    )
    LlamaForCausalLM(config).save_pretrained(path)
