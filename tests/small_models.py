"""Sizes of the small models that calibrations and the tuner are tested with."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "vocab_size": 40,
    "initializer_range": 0.4,
}
