"""Attention of a layer that takes latent vectors, in the place of its cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvpolicy.engine.attention import attend
from kvpolicy.hf.cache_forward import CacheForward
from kvpolicy.hf.latent import LatentSlots, TakesLatents, expansion
from kvpolicy.hf.passing_cache import PassingCache
from kvpolicy.statistics import Forward
from kvpolicy.statistics.windows import ScoreTransform


class LatentAttention(NamedTuple):
    """Attends through the slots of a layer with latent attention, in the place of its cache.

    Attributes:
        cache: The cache.
        layer: The layer.
        module: Its attention module, with `kv_b_proj` from latent vectors to keys and values of all heads.
    """

    cache: CacheForward | PassingCache
    layer: TakesLatents
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
        of_keys, of_values = expansion(self.module, latent, q.shape[1]).to(q.dtype).split([plain, v.shape[3]], -2)
        folded = torch.cat([q[..., :plain] @ of_keys, q[..., plain:]], -1)
        keys = torch.cat([latent, rotated], -1).to(q.dtype)
        given = (layer_idx, folded, keys, keys[..., :0], valid, transform, forward)
        # A prompt without slots attends to expanded vectors, as in transformers: fewer numbers for each pair.
        stands_alone = isinstance(self.layer, LatentSlots) and not self.layer.holds_tokens
        if stands_alone and isinstance(self.cache, CacheForward) and self.cache.tile is None:
            return self.cache.attend(*given, lambda *folded: attend(q, k, v, *folded[3:]))
        return self.cache.attend(*given)[..., : latent.shape[3]] @ of_values.mT
