"""The attention that each token receives of all queries of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from kvpolicy.statistics.statistic import Context, Statistic
from kvpolicy.statistics.windows import together


@dataclass(frozen=True)
class AttentionSum(Statistic[Tensor]):
    """The attention weights of each candidate summed over the queries of this forward, [B, Hq, N].

    Attributes:
        total: The sums [B, Hq, S + P] fp32; None before attention has computed them.
    """

    total: Tensor | None = None
    of_readers: ClassVar[bool] = True
    of_attention: ClassVar[bool] = True
    along: ClassVar = "heads"
    words: ClassVar[str] = "the sum of attention weights over all queries of the prompt"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The sums."""
        return () if self.total is None else (self.total,)

    def joined(self, later: Any, columns: int) -> AttentionSum:
        """The sums over the queries of both."""
        if self.total is None or later.total is None:
            return later
        # The columns of the later sums begin with those of the earlier ones, which its queries had as a past.
        return replace(later, total=later.total + F.pad(self.total, (0, later.total.shape[-1] - self.total.shape[-1])))

    def beside(self, other: Any, heads: int) -> AttentionSum:
        """The sums of both layers."""
        assert self.total is not None and other.total is not None
        return AttentionSum(together(self.total, other.total, heads))

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> AttentionSum:
        """The same with `fn` of the sums."""
        return replace(self, total=None if self.total is None else fn(self.total))

    def reduced(self, context: Context) -> Tensor:
        """The sums."""
        assert self.total is not None
        return self.total
