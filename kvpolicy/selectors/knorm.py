"""Knorm: keep the tokens whose keys are short."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvpolicy.protocols import DecodeMode, ScoredByKeys
from kvpolicy.text.strategy import strategy


@strategy
class KeyNorm(ScoredByKeys):
    """Keep the tokens whose keys are short.

    Short keys were found to receive much attention, in the mean of many heads. Nothing is needed but the keys.

    Args:
        decode: Whether generated tokens compete for the budget (`evict`) or are kept in addition to it (`grow`).

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("knorm@0.5"))
        'knorm@0.5'

    Source:
        A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (arXiv:2406.11430), Section 3, and
        kvpress (KnormPress). Differences:

        - The newest token is always kept.
        - Generated tokens are ranked too, one of which is evicted in each step.
        - The paper leaves the first two layers whole, which is a policy by layer here.
        - A later prompt scores the kept tokens again together with its own. With a codec, coded keys are scored as
          attention reads them.
    """

    decode: DecodeMode = "evict"

    nested_from: ClassVar[int | None] = 1

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        """Minus the length of the key: [B, H, N]."""
        return -torch.linalg.vector_norm(keys, dim=-1)
