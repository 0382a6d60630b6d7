"""Latent attention (MLA): a token is held as one latent vector and one rotated key, which all query heads share.

transformers caches both and expands all of them for all heads in every step. Here the expansion is folded into queries
and outputs: a query head attends to the latent vectors themselves. So a layer has one KV head, a key is a latent vector
and behind it a rotated key, a value is the latent part of its key, and nothing of a token is held twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvpolicy.engine.attention import attend
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.projection import matrix_of, output_projection
from kvpolicy.statistics import Forward
from kvpolicy.statistics.windows import ScoreTransform


class TakesLatents:
    """A layer of a cache that is given latent vectors, and hands them over to its attention.

    transformers expands what `update` returns, so that the attention function would see expanded vectors alone.
    """

    _given: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep latent vectors [B, 1, P, r] and rotated keys [B, 1, P, d] until attention takes them."""
        self._given = key_states, value_states
        return key_states, value_states

    def take_latents(self) -> tuple[Tensor, Tensor]:
        """What `update` was given; the layer lets go of it."""
        given, self._given = self._given, None
        assert given is not None, "transformers updates a layer before it attends"
        return given


class LatentSlots(TakesLatents, PolicyLayer):
    """The slots of a layer with latent attention."""


class LatentAttention(NamedTuple):
    """Attends through the slots of a layer with latent attention, in the place of its cache.

    Attributes:
        cache: The cache.
        layer: The layer.
        module: Its attention module, with `kv_b_proj` from latent vectors to keys and values of all heads.
    """

    cache: Any
    layer: Any
    module: nn.Module

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        transform: ScoreTransform,
        forward: Forward | None = None,
    ) -> Tensor:
        """Attend from new tokens; see `PolicyCache.attend`.

        Args:
            layer_idx: Index of the layer.
            q: [B, Hq, P, n + d]: n channels for expanded latent vectors, and d rotated ones.
            k: Expanded keys, [B, Hq, P, n + d].
            v: Expanded values, [B, Hq, P, D'].
            valid: Which of the P tokens are not padding, [B, P] bool; None if all are.
            transform: From products to attention weights.
            forward: The arguments of the attention module, if the selector needs them.

        Returns:
            [B, Hq, P, D'].
        """
        latent, rotated = self.layer.take_latents()
        plain = q.shape[3] - rotated.shape[3]
        of_keys, of_values = _expansion(self.module, latent, q.shape[1]).to(q.dtype).split([plain, v.shape[3]], -2)
        folded = torch.cat([q[..., :plain] @ of_keys, q[..., plain:]], -1)
        keys = torch.cat([latent, rotated], -1).to(q.dtype)
        given = (layer_idx, folded, keys, keys[..., :0], valid, transform, forward)
        if self.cache.tile is None and not self.layer.holds_tokens:  # fewer numbers for each pair, as transformers does
            return self.cache.attend(*given, lambda *folded: attend(q, k, v, *folded[3:]))
        return self.cache.attend(*given)[..., : latent.shape[3]] @ of_values.mT


def latent_projection(module: Any) -> Tensor:
    """What leads from latent vectors, as values of each query head, behind its output projection, [hidden, Hq * r].

    Raises:
        KVPolicyError: If a weight cannot be read, or depends on the tokens.
    """
    behind = output_projection(module)
    heads = behind.shape[-1] // module.v_head_dim
    like = behind.new_empty(0, module.kv_lora_rank)
    of_values = _expansion(module, like, heads)[..., -module.v_head_dim :, :]
    each = behind.unflatten(-1, (heads, -1)).transpose(-3, -2)  # [Hq, hidden, D']
    return (each @ of_values.to(behind.dtype)).transpose(-3, -2).flatten(-2)


def _expansion(module: Any, like: Tensor, heads: int) -> Tensor:
    """The weight by which latent vectors are expanded, [Hq, n + D', r], or one for each row, [B, Hq, n + D', r]."""
    return matrix_of(module.kv_b_proj, like, "latent attention (MLA), got an adapter").unflatten(-2, (heads, -1))
