"""Attention to vectors of fp16 on a GPU, where the loop that converts a number is the one that multiplies it.

On a CPU, inductor (torch 2.13) converts fp16 number by number, and the same takes several times as long as a conversion
of some thousand vectors at a time with a product of matrices.
"""

from __future__ import annotations

from torch import Tensor

from kvpolicy.kernels.compiled import apart, is_compiled
from kvpolicy.kernels.fused_elements import mix_elements, score_elements


def is_read_whole(vectors: Tensor) -> bool:
    """Whether vectors of fp16 [B, H, C, D] are read by these functions, compiled."""
    return vectors.device.type != "cpu" and is_compiled(vectors)


@apart
def score_half(vectors: Tensor, queries: Tensor) -> Tensor:
    """Products of queries [B, H, G, D] fp32 with vectors [B, H, C, D] fp16, [B, H, G, C] fp32."""
    return score_elements([vectors.float()], queries)


@apart
def mix_half(vectors: Tensor, weights: Tensor) -> Tensor:
    """Sums of vectors [B, H, *S, D] fp16, weighted by [B, H, G, *S] fp32, [B, H, G, D] fp32."""
    return mix_elements([vectors.float()], weights)
