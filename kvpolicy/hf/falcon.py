"""Falcon's attention, which does not go through transformers' attention interface."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb


def replace_forward(module: Any) -> Callable[[], None]:
    """Let a Falcon attention call the attention function of its config; returns how to undo it."""
    name = "_old_forward" if hasattr(module, "_old_forward") else "forward"  # accelerate keeps the original there
    before = module.__dict__.get(name)
    setattr(module, name, MethodType(_forward, module))
    module.num_key_value_groups = module.num_heads // max(module.num_kv_heads, 1)  # stock functions repeat by it

    def undo() -> None:
        del module.num_key_value_groups
        if before is None:
            module.__dict__.pop(name, None)
        else:
            setattr(module, name, before)

    return undo


def _forward(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Project, rotate, attend, project: [B, P, hidden]."""
    assert position_embeddings is not None and alibi is None
    query, key, value = (part.transpose(1, 2) for part in _split(self, self.query_key_value(hidden_states)))
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    run = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    out, _ = run(self, query, key, value, attention_mask, scaling=self.inv_norm_factor, **kwargs)
    return self.dense(out.flatten(2)), None


def _split(self: Any, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, P, Hq, D], keys and values [B, P, H, D]; grouped heads stay grouped, where Falcon repeats them."""
    if not self.new_decoder_architecture:
        return self._split_heads(fused)
    grouped = fused.unflatten(-1, (self.num_kv_heads, -1, self.head_dim))
    return grouped[:, :, :, :-2].flatten(2, 3), grouped[:, :, :, -2], grouped[:, :, :, -1]
