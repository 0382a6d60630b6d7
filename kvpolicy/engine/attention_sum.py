"""The attention summed over all queries of a prompt, `Seen.attn_sum`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.joint_heads import together
from kvpolicy.engine.statistic import Candidates, Coming, Tile


@dataclass(frozen=True)
class AttentionSum:
    """The sum over the queries, which attention itself computes: `attend` and `attend_tile` have the weights.

    Attributes:
        total: [B, Hq, S + P] fp32, over past slots and new tokens; None until the prompt was attended to.
    """

    total: Tensor | None = None

    reads_past = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The sums."""
        return () if self.total is None else (self.total,)

    def begun(self, coming: Coming) -> AttentionSum:
        """Nothing is known before attention."""
        return self

    def added(self, tile: Tile) -> AttentionSum:
        """Nothing: a tile's weights are known to attention only."""
        return self

    def joined(self, later: AttentionSum, columns: int) -> AttentionSum:
        """The sums over the queries of both."""
        if self.total is None or later.total is None:
            return later
        # The columns of the later sums begin with those of the earlier ones, which its queries had as a past.
        return replace(later, total=later.total + F.pad(self.total, (0, later.total.shape[-1] - self.total.shape[-1])))

    def beside(self, other: AttentionSum, heads: int) -> AttentionSum:
        """The sums of both layers."""
        assert self.total is not None and other.total is not None
        return AttentionSum(together(self.total, other.total, heads))

    def reduced(self, candidates: Candidates) -> Mapping[str, Any]:
        """The sums."""
        return {"attn_sum": self.total}

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> AttentionSum:
        """The same with `fn` of the sums."""
        return replace(self, total=None if self.total is None else fn(self.total))
