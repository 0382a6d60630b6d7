"""The result of attention to some of the keys, which can be joined with that to others."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
