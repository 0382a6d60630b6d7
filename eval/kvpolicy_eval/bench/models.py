"""Models and prompts of the benchmarks: random weights, since only times count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


def llama(
    layers: int,
    hidden: int = 512,
    heads: int = 8,
    *,
    kv_heads: int | None = None,
    vocabulary: int = 1024,
    positions: int = 32768,
) -> Any:
    """A Llama with random weights in fp32, the same in every call; as many KV heads as heads if none are given."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def tokens(length: int) -> Tensor:
    """One row of random token ids, [1, length]."""
    return torch.randint(1, 1024, (1, length), generator=torch.Generator().manual_seed(0))
