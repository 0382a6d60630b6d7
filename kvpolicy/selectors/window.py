"""SlidingWindow: keep the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.protocols import DecodeMode, Needs, Seen, State, View
from kvpolicy.selectors._common import by_position, check_decode
from kvpolicy.spec.arguments import named_options
from kvpolicy.spec.validation import check_fields


@named_options
@dataclass(frozen=True, kw_only=True, slots=True)
class SlidingWindow:
    """Keep the newest tokens.

    The size of the window is the budget. It needs no attention statistics, so a prefill has no overhead.

    Args:
        decode: `evict` slides the window over generated tokens; `grow` keeps them in addition to the budget.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy(selector=SlidingWindow(), budget=128))
        'window@128'

    Source:
        The baseline of SqueezeAttention (arXiv:2404.04793), Section 4. Differences: the window includes the current
        token (as in its Mistral code, but not in its Llama code), and prefill attention is never windowed.
    """

    decode: DecodeMode = "evict"

    def __post_init__(self) -> None:
        """Check the hyperparameters."""
        check_fields(self)
        check_decode(self.decode)

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
        """Higher priority for later tokens: [B, H, N]."""
        return by_position(view.positions)

    def statistic(self, seen: Seen, view: View) -> Tensor | None:
        """None: tokens are not scored."""
        return None
