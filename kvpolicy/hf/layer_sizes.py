"""The sizes of the keys and values that a layer caches, from its config."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvpolicy.protocols import LayerShape


class LayerSize(NamedTuple):
    """Sizes of the keys and values of a layer, on all ranks together.

    Attributes:
        heads: KV heads.
        head_dim: Size of a key.
        value_dim: Size of a value that is held; 0 if a value is a part of its key.
        latent: How many numbers of a key are its value then; else 0.
        queries: Query heads.
    """

    heads: int
    head_dim: int
    value_dim: int
    latent: int
    queries: int

    def on(self, dtype: torch.dtype, ranks: int) -> LayerShape:
        """The shape of the layer on one of `ranks` ranks.

        The query heads of a KV head are divided if ranks outnumber KV heads.
        """
        group = max(self.queries // self.heads // max(ranks // self.heads, 1), 1)
        value_dim = None if self.value_dim == self.head_dim else self.value_dim
        heads = -(-self.heads // ranks)
        return LayerShape(heads, self.head_dim, dtype, group, self.heads, value_dim, self.latent)


def layer_size(text: Any, window: int | None) -> LayerSize:
    """The sizes of a layer.

    Args:
        text: The config of the layer.
        window: Its sliding window; None if it attends to all tokens.
    """
    queries: int = text.num_attention_heads
    latent: int = getattr(text, "kv_lora_rank", None) or 0
    if latent:
        return LayerSize(1, latent + text.qk_rope_head_dim, 0, latent, queries)
    heads = getattr(text, "num_key_value_heads", None) or queries
    if text.model_type == "falcon":  # its older architecture ignores num_kv_heads
        heads = text.num_kv_heads
        if not text.new_decoder_architecture:
            heads = 1 if text.multi_query else queries
    if text.model_type == "mimo_v2_flash" and window is not None:  # by its attention module, not by its config
        heads *= 2
    dim = getattr(text, "head_dim", None) or text.hidden_size // queries
    return LayerSize(heads, dim, getattr(text, "v_head_dim", None) or dim, 0, queries)
