"""Products of queries and keys, which attention and codecs share."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLER = 2.0**-4
"""What fp16 queries are multiplied by before products and divided by after: no digit is lost, but to tiny numbers."""


def products(queries: Tensor, keys: Tensor) -> Tensor:
    """Products of queries [..., M, D] with keys [..., N, D], fp32 [..., M, N]; in fp16 many a raw one would be inf."""
    if queries.dtype != torch.float16:
        return (queries @ keys.transpose(-1, -2)).float()
    return (queries * SMALLER @ keys.transpose(-1, -2)).float().div_(SMALLER)
