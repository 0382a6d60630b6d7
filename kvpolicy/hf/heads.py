"""The heads of a config, and whether a backend can shard them."""

from __future__ import annotations

from typing import Any

from kvpolicy.hf.model_spec import describe
from kvpolicy.parallel.sharding import Heads, check_family, check_heads
from kvpolicy.text.errors import KVPolicyError


def heads_of(config: Any, rank: int, size: int) -> Heads:
    """The heads of a model that one rank holds.

    Args:
        config: A transformers config.
        rank: Which rank.
        size: The tensor parallel size.

    Examples:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(num_attention_heads=8, num_key_value_heads=2, hidden_size=512)
        >>> heads_of(config, 0, 2).queries
        range(0, 4)
    """
    shape = describe(config).shape
    queries = int(config.get_text_config(decoder=True).num_attention_heads)
    return Heads.shard(queries, shape.heads, shape.head_dim, rank=rank, size=size)


def check_shardable(config: Any, backend: str, size: int) -> None:
    """Check that a backend is tested with a model, and can shard its heads.

    Args:
        config: A transformers config.
        backend: `deepspeed` or `hf`.
        size: The tensor parallel size.

    Raises:
        KVPolicyError: If it is not, or cannot.
    """
    check_family(config.model_type, backend)
    if getattr(config, "quantization_config", None):
        raise KVPolicyError(
            f"Weights must not be quantized to be sharded, got a {config.model_type} with a quantization_config; try a "
            "checkpoint in bfloat16, float16 or float32."
        )
    queries = int(config.get_text_config(decoder=True).num_attention_heads)
    check_heads(config.model_type, backend, queries=queries, keys=describe(config).shape.heads, size=size)
