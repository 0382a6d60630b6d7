"""Store tokens as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.protocols import Codes, Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Plain:
    """Store every token in the model's own dtype.

    There is no coded part, so nothing is ever written or read here.

    >>> Plain().layout(100)
    Layout(exact=100, coded=0)
    """

    @property
    def block(self) -> int:
        """Nothing is coded."""
        return 0

    @property
    def residual(self) -> int:
        """Nothing leaves the exact part, so nothing must be held back."""
        return 0

    def layout(self, tokens: int) -> Layout:
        """All slots exact."""
        return Layout(tokens, 0)

    def check(self, head_dim: int) -> None:
        """Any vector will do."""

    def alloc(self, batch: int, heads: int, coded: int, head_dim: int, device: torch.device | str) -> Codes:
        """No codes."""
        return ()

    def write(self, codes: Codes, keys: Tensor, values: Tensor, slots: Tensor, active: Tensor, live: Tensor) -> None:
        """Write nothing: there is no coded slot."""

    def read(self, codes: Codes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Never called: there is no coded slot."""
        raise AssertionError("a plain cache has no coded part to read")
