"""KeepAll: keep every token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.protocols import DecodeMode, Needs, Seen, State, View
from kvpolicy.spec.arguments import named_options


@named_options
@dataclass(frozen=True, kw_only=True, slots=True)
class KeepAll:
    """Keep every token: none is evicted, and generated tokens get additional slots.

    This is the default selector of a policy. The cache is as large as the stock cache, or smaller with a codec.

    Examples:
        >>> KeepAll().decode
        'grow'
    """

    @property
    def decode(self) -> DecodeMode:
        """Generated tokens are kept in addition to the budget."""
        return "grow"

    @property
    def needs(self) -> Needs:
        """No attention statistics."""
        return Needs()

    @property
    def min_tokens(self) -> int:
        """One token: the current one."""
        return 1

    def alloc(self, batch: int, heads: int, slots: int, device: torch.device | str) -> State:
        """No state."""
        return ()

    def observe(self, state: State, seen: Seen, view: View) -> State:
        """No state."""
        return state

    def step(self, state: State, row: Tensor, view: View) -> None:
        """No state."""

    def priority(self, state: State, view: View) -> Tensor:
        """Equal priority for every token, [B, H, N]."""
        return torch.zeros_like(view.positions, dtype=torch.float32)

    def statistic(self, seen: Seen, view: View) -> Tensor | None:
        """None: tokens are not scored."""
        return None
