"""The caches of transformers, which the processes of both sides can make: this file imports no module of ours."""

from __future__ import annotations

from typing import Any

QUANTIZERS = {"quanto": "optimum-quanto", "hqq": "hqq"}
"""Backends of QuantizedCache, and the packages that they need."""
_AXES = {"quanto": 0, "hqq": 1}
"""Axis of the groups of each backend, as the documentation of transformers recommends."""


def is_quantized(method: str) -> bool:
    """Whether a method is a QuantizedCache alone.

    >>> is_quantized("quanto-4"), is_quantized("snapkv:window_size=64+quanto-4"), is_quantized("")
    (True, False, False)
    """
    return method.partition("-")[0] in QUANTIZERS


def stock_cache(config: Any, quantization: str = "") -> Any:
    """An empty cache of transformers.

    Args:
        config: Of the model.
        quantization: Backend and bits of a QuantizedCache, such as `quanto-4`; empty for a DynamicCache.
    """
    from transformers import DynamicCache, QuantizedCache

    if not quantization:
        return DynamicCache(config=config)
    backend, bits = quantization.split("-")
    group = min(64, config.head_dim * config.num_key_value_heads)
    axis = _AXES[backend]
    return QuantizedCache(backend, config, nbits=int(bits), axis_key=axis, axis_value=axis, q_group_size=group)
