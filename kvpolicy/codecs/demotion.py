"""Which tokens of a codec leave the more precise slots first, where it is not the oldest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvpolicy.protocols import Demotion


@dataclass(frozen=True, slots=True)
class ByPriority(Demotion):
    """The token of lowest priority to the policy's selector leaves first; of equal ones, the one of later position.

    Attributes:
        recodes: Whether all tokens are encoded again, instead of one block, whenever the full-precision buffer is full.
    """

    recodes: bool = False  # pyright: ignore[reportIncompatibleMethodOverride]  # a field of a frozen class is read only
    words: ClassVar[str] = "Tokens of lowest priority are demoted first."

    def order(self, positions: Tensor, priority: Tensor) -> Tensor:
        """Indices of the tokens, lowest priority first, [B, H, n]."""
        # Ties leave from the later position, as in eviction: sort by falling position first, then stably.
        order = positions.argsort(dim=-1, descending=True, stable=True)
        return order.gather(-1, priority.gather(-1, order).argsort(dim=-1, stable=True))
