"""Keep every token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.protocols import DecodeMode, Needs, Seen, State, View


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepAll:
    """Keep every token: nothing is ever dropped, and generated tokens get room.

    What a policy does that names no selector. The cache is then as large as the stock one, or smaller where a codec
    stores it.

    Examples:
        >>> KeepAll().decode
        'grow'
    """

    @property
    def decode(self) -> DecodeMode:
        """Generated tokens get room of their own."""
        return "grow"

    @property
    def needs(self) -> Needs:
        """Nothing of attention."""
        return Needs()

    @property
    def min_tokens(self) -> int:
        """One token."""
        return 1

    def alloc(self, batch: int, heads: int, slots: int, device: torch.device | str) -> State:
        """Nothing to remember."""
        return ()

    def observe(self, state: State, seen: Seen, view: View) -> State:
        """Nothing to learn."""
        return state

    def step(self, state: State, row: Tensor, view: View) -> None:
        """Nothing to learn."""

    def priority(self, state: State, view: View) -> Tensor:
        """Every token is worth the same, [B, H, N] fp32."""
        return torch.zeros_like(view.positions, dtype=torch.float32)

    def statistic(self, seen: Seen, view: View) -> Tensor | None:
        """There is no score to refine."""
        return None
