"""The product of queries and keys, as attention and the codecs compute it."""

from __future__ import annotations

import torch
from torch import Tensor

QUERY_SCALE = 2.0**-4
"""The factor on fp16 queries before the product; a power of two, so that dividing by it afterwards restores the
scores exactly unless an element underflows."""


def products(queries: Tensor, keys: Tensor) -> Tensor:
    """Multiply queries [..., M, D] with keys [..., N, D].

    In fp16, queries are scaled down first, because an unscaled dot product often exceeds the range of fp16.

    Returns:
        Scores, [..., M, N] fp32.
    """
    if queries.dtype != torch.float16:
        return (queries @ keys.transpose(-1, -2)).float()
    return (queries * QUERY_SCALE @ keys.transpose(-1, -2)).float().div_(QUERY_SCALE)
