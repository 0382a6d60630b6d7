"""Take from layers that change little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvpolicy.allocators.kmeans import top_group
from kvpolicy.allocators.profile import load_profile
from kvpolicy.spec.budget import waterfill
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.validation import check_fields

_SAME = 1e-6  # cosines closer than this are equal


@dataclass(frozen=True, kw_only=True, slots=True)
class SqueezeAttention:
    """Move budget away from layers whose attention barely changes its input.

    Each layer is measured by the cosine between the residual stream before and after its attention, averaged over the
    prompt. The layers fall into `groups`; the most similar group keeps `share` of an even budget, and the others
    divide the rest evenly. The total stays the same.

    Args:
        share: What the most similar layers keep of an even budget, in (0, 1]; less moves more.
        groups: How many groups the layers fall into, at least 2.
        profile: A file of recorded cosines (see `save_profile`). With it nothing is measured, and each layer is
            compressed as soon as it has run; without it, all layers of the prompt run first.

    Examples:
        >>> cosine = torch.tensor([[0.5, 0.7, 0.95, 0.96, 0.97]])
        >>> SqueezeAttention().budgets(cosine, torch.tensor([500]), 1, torch.tensor([1000]), 5).tolist()
        [[190, 190, 40, 40, 40]]

    Source: SqueezeAttention (arXiv:2404.04793), Algorithm 1. Differences from the paper and its code: `share` is the
    kept part, as in Algorithm 1 (the paper's discussion says the opposite). The k-means is exact and has no seed. The
    cosine and its mean are fp32, over the row's own tokens without padding, and every row has its own budgets. No
    layer gets more than it can use: that goes to the others in proportion. Rounding keeps the total. Fewer than three
    layers, or fewer distinct cosines than groups, share evenly.
    """

    share: float = 0.4
    groups: int = 3
    profile: str | None = None

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_fields(self)
        if not 0 < self.share <= 1:
            raise KVPolicyError(f"SqueezeAttention's share is {self.share}: give a number in (0, 1], such as 0.4.")
        if self.groups < 2:
            raise KVPolicyError(f"SqueezeAttention's groups is {self.groups}: give at least 2.")

    @property
    def layer_metric(self) -> Literal["", "cosine"]:
        """The cosine, unless a profile has it."""
        return "" if self.profile else "cosine"

    def budgets(self, metrics: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        """Tokens per layer and row, [B, L] int64; see `Allocator.budgets`.

        Raises:
            KVPolicyError: Where the profile cannot be read or is of a model with other layers.
        """
        if self.profile:
            recorded = torch.tensor(load_profile(self.profile, layers), dtype=torch.float32)
            idle = self._idle(recorded).expand(len(total), -1)
        else:
            assert metrics is not None, "squeeze needs the cosine of every layer"
            idle = torch.stack([self._idle(row) for row in metrics.float().cpu()])
        idle = idle.to(total.device)
        even = total.double()[:, None] / layers
        kept = torch.where(idle.any(-1, keepdim=True), self.share * even, even)
        count = idle.sum(-1, keepdim=True)
        rest = (total[:, None] - count * kept) / (layers - count)
        return waterfill(torch.where(idle, kept, rest), total, floor, ceiling)

    def _idle(self, cosine: Tensor) -> Tensor:
        """Which layers give budget away, [L] bool, for one row's `cosine` [L]."""
        distinct = 1 + int((cosine.sort().values.diff() > _SAME).sum())
        if len(cosine) < max(3, self.groups) or distinct < self.groups or not bool(cosine.isfinite().all()):
            return torch.zeros_like(cosine, dtype=torch.bool)
        return top_group(cosine, self.groups)
