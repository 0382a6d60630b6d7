"""The sliding window: keep the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.protocols import DecodeMode, Needs, Seen, State, View
from kvpolicy.selectors._common import by_position, check_decode
from kvpolicy.spec.validation import check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class SlidingWindow:
    """Keep the newest tokens.

    The budget is the window. Nothing of attention is looked at, so a prefill pays nothing for it.

    Args:
        decode: `evict` slides the window over generated tokens; `grow` gives them room of their own.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy(selector=SlidingWindow(), budget=128))
        'window@128'

    Source:
        The baseline of SqueezeAttention (arXiv:2404.04793), Section 4. Differences: the window counts the current
        token (its Mistral code does, its Llama code does not), and prefill attention is never windowed.
    """

    decode: DecodeMode = "evict"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        check_fields(self)
        check_decode(self.decode)

    @property
    def needs(self) -> Needs:
        """Nothing of attention."""
        return Needs()

    @property
    def min_tokens(self) -> int:
        """One token, the current one."""
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
        """The later the token, the higher: [B, H, N]."""
        return by_position(view.positions)

    def statistic(self, seen: Seen, view: View) -> Tensor | None:
        """None: a window scores nothing."""
        return None
