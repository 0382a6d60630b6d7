"""Attention to some of the keys, with the normalizer of its weights, and how it is joined to attention to others.

Keys that all queries see need no mask then, and the normalizer of some keys alone is known besides the output of all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.attention import ScoreTransform

_FUSED: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""The operation of `scaled_dot_product_attention` on a CPU, which returns the normalizer besides the output."""


class Part(NamedTuple):
    """Attention to some keys.

    Attributes:
        output: [B, H, G, T, D].
        normalizer: Logarithm of the sum of the exponentials of the scores, [B, H, G, T] fp32.
    """

    output: Tensor
    normalizer: Tensor

    def joined(self, other: Part | None) -> Part:
        """Attention to the keys of both, of which no key is in both; in the memory of this one."""
        if other is None:
            return self
        share = torch.sigmoid(other.normalizer - self.normalizer)[..., None]
        normalizer = torch.logaddexp(self.normalizer, other.normalizer)
        return Part(self.output.lerp_(other.output, share), normalizer)


def has_parts(q: Tensor, k: Tensor, v: Tensor, transform: ScoreTransform) -> bool:
    """Whether attention of these tensors can be computed in parts.

    In half precision, parts would be rounded before they are joined.
    """
    fused = transform.softcap is None and transform.sinks is None and q.shape[-1] == v.shape[-1]
    return _FUSED is not None and fused and all(t.device.type == "cpu" and t.dtype == torch.float32 for t in (q, k, v))


def attend_part(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Part | None:
    """Attend from all queries to all of some keys; None if there are none.

    Args:
        queries: [B, H, G, T, D].
        keys: [B, H, N, D].
        values: [B, H, N, D].
        scale: The factor on the products.
    """
    if not keys.shape[2]:
        return None
    grouped = queries.shape[2:4]
    output, normalizer = _FUSED(queries.flatten(2, 3), keys, values, 0.0, False, scale=scale)
    return Part(output.unflatten(2, grouped), normalizer.unflatten(2, grouped))


def attend_causal(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Part:
    """Attend causally from queries to their own keys; arguments as in `attend_part`, with N = T."""
    # One query head of each group at a time, since the fused function would need copies of the keys.
    parts = [_FUSED(queries[:, :, g], keys, values, 0.0, True, scale=scale) for g in range(queries.shape[2])]
    output, normalizer = (torch.stack(each, 2) for each in zip(*parts, strict=True))
    return Part(output, normalizer)
