"""Looking at the attention layers of an engine while it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy.text.errors import KVPolicyError
from kvpolicy_vllm.blocks import BlockReader
from kvpolicy_vllm.compressor import Compressor, EngineLayer
from kvpolicy_vllm.engine import Engine
from kvpolicy_vllm.loading import Heads, Write
from kvpolicy_vllm.recipe import Recipe

See = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""Sees a layer: `see(layer_idx, queries, keys, out, slots)`; see `Compressor.see`."""


def tap(module: Any, layer_idx: int, see: See) -> None:
    """Look at the attention of a layer in every forward, also in compiled ones, which call it as an operation.

    Args:
        module: The attention module, with its backend as `impl`.
        layer_idx: The layer.
        see: Is called when the output is there.
    """
    forward = module.impl.forward

    def seen(
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        **more: Any,
    ) -> Any:
        found = forward(layer, query, key, value, kv_cache, attn_metadata, output=output, **more)
        if attn_metadata is not None:
            see(layer_idx, query, key, output, attn_metadata.slot_mapping)
        return found

    module.impl.forward = seen


def compressor_of(
    recipe: Recipe, engine: Engine, heads: Heads, layers: Mapping[int, Any], sizes: tuple[int, int], write: Write
) -> Compressor:
    """Compression of prompts in the layers of a rank.

    Args:
        recipe: How prompts are compressed.
        engine: The engine.
        heads: The heads of this rank.
        layers: Attention modules by index.
        sizes: How many blocks there are, and their tokens.
        write: Writes to the cache of a layer.

    Raises:
        KVPolicyError: If a layer cannot be read.
    """
    blocks, block_size = sizes
    found: dict[int, EngineLayer] = {}
    for index, module in layers.items():
        size = int(module.head_size)
        if getattr(module, "head_size_v", size) != size:
            raise KVPolicyError(
                f"Keys and values must have the same size for prompts to be compressed, got {size} and "
                f"{module.head_size_v} in layer {index}."
            )
        if getattr(module, "kv_cache_update_bypass", False):
            raise KVPolicyError(
                "Keys must pass through attention for prompts to be compressed, got layer "
                f"{index}, which writes them by a fused operation."
            )

        def write_slots(keys: Tensor, values: Tensor, slots: Tensor, index: int = index) -> None:
            write(index, keys, values, slots)

        with torch.inference_mode():
            reader = BlockReader(module.kv_cache, blocks, (block_size, heads.number, size), write_slots)
        impl = module.impl
        cap = getattr(impl, "logits_soft_cap", None) or None
        transform = ScoreTransform(float(impl.scale), cap, getattr(impl, "sinks", None))
        found[index] = EngineLayer(engine.skeleton.rotations[index], transform, reader, size)
    return Compressor(recipe, found)
