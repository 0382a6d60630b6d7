"""KeepAll: keep every token."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.protocols import Selector, State, View
from kvpolicy.text.strategy import strategy


@strategy
class KeepAll(Selector):
    """Keep every token: none is evicted, and generated tokens get additional slots.

    This is the default selector of a policy. The cache is as large as the stock cache, or smaller with a codec.

    Examples:
        >>> KeepAll().decode
        'grow'
    """

    decode = "grow"

    @property
    def positions_only(self) -> bool:
        return True

    def priority(self, state: State, view: View) -> Tensor:
        """Equal priority for every token, [B, H, N]."""
        return torch.zeros_like(view.positions, dtype=torch.float32)
