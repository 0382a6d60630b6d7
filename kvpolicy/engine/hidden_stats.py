"""Statistics of a prompt's hidden states."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def massive_tokens(hidden: Tensor, valid: Tensor | None, count: int) -> Tensor:
    """Which tokens hold the `count` largest activations of their row, [B, P] bool.

    Of equal activations, those of earlier tokens count. In the first layer, all that a repeated token has are equal.

    Args:
        hidden: Hidden states, [B, P, hidden].
        valid: Which of the P tokens are not padding, [B, P] bool; None if all are.
        count: How many activations.
    """
    size = hidden.detach().abs()  # in their dtype, which orders them as fp32 would: a prompt is long
    if valid is not None:
        # Below any absolute value. If a row has too few activations, padding is found, but has no position to pin.
        size = size.masked_fill(~valid[..., None], -1)
    count = min(count, size[0].numel())
    if count == 0:
        return torch.zeros(size.shape[:2], dtype=torch.bool, device=size.device)
    # The values of `topk` are determined, but which of several equal elements it takes is not.
    least = size.flatten(1).topk(count).values[:, -1, None, None]
    # activations of each token, [B, P]
    above = (size > least).sum(-1)
    equal = (size == least).sum(-1)
    earlier = equal.cumsum(-1) - equal
    return (above > 0) | ((equal > 0) & (earlier < count - above.sum(-1, keepdim=True)))


class CosineSum(NamedTuple):
    """Cosines of a row's tokens, summed.

    Attributes:
        total: [B] fp32.
        tokens: How many, [B] fp32.
    """

    total: Tensor
    tokens: Tensor

    def plus(self, other: CosineSum) -> CosineSum:
        """The sum over the tokens of both."""
        return CosineSum(self.total + other.total, self.tokens + other.tokens)

    @property
    def mean(self) -> Tensor:
        """[B] fp32; 0 for a row without tokens."""
        return self.total / self.tokens.clamp_min(1)


def sum_cosines(before: Tensor, update: Tensor, valid: Tensor | None) -> CosineSum:
    """Cosine similarity of hidden states before and after an update, summed over each row's tokens.

    Args:
        before: Hidden states, [B, P, hidden].
        update: The update that is added to them, [B, P, hidden].
        valid: Which of the P tokens are not padding, [B, P] bool; None if all are.
    """
    before = before.detach().float()
    cosine = F.cosine_similarity(before, before + update.detach().float(), dim=-1)
    weight = torch.ones_like(cosine) if valid is None else valid.to(cosine)
    return CosineSum((cosine * weight).sum(-1), weight.sum(-1))
