"""More for the first layers, less for the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvpolicy.spec.budget import waterfill
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.validation import check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Pyramid:
    """Give early layers more budget than late ones, falling in a straight line.

    Attention is spread out in the first layers and gathers on few tokens in the last, so the last need fewer. The
    last layer gets the even share divided by `beta`, the first what keeps the average.

    Args:
        beta: How many times less than an even share the last layer gets, at least 1 (1 is uniform).

    Examples:
        >>> Pyramid(beta=2).budgets(None, torch.tensor([40]), 1, torch.tensor([100]), 4).tolist()
        [[15, 12, 8, 5]]

    Source: PyramidKV (arXiv:2406.02069), Section 3. Differences from the authors' code: the slope is a fraction, not
    rounded down (which overspends by up to 16%); the observation window is part of the budget, not added to it; what a
    layer cannot use goes to the others in proportion; and there is no fallback to uniform for short prompts.
    """

    beta: float = 20.0

    def __post_init__(self) -> None:
        """Check `beta`."""
        check_fields(self)
        if not 1 <= self.beta < float("inf"):
            raise KVPolicyError(f"Pyramid's beta is {self.beta}: give a number of at least 1, such as 20.")

    @property
    def layer_metric(self) -> Literal["", "cosine"]:
        """Nothing is measured."""
        return ""

    def budgets(self, metrics: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        """Tokens per layer and row, [B, L] int64; see `Allocator.budgets`."""
        even = total.double()[:, None] / layers
        least = even / self.beta
        down = torch.linspace(0, 1, layers, dtype=torch.float64, device=total.device) if layers > 1 else 0.5
        most = 2 * even - least
        return waterfill(most - down * (most - least), total, floor, ceiling)
